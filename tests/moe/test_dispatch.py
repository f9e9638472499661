"""Dispatchers, permutation, experts and the whole layer in one process, against one token and one expert at a time."""

from __future__ import annotations

import pytest
import torch
from tests.moe.moe_cases import EXPERTS, FFN, HIDDEN, Shape, build_layer, dense_loop, fp64, options, tokens_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mt_core.parallel.context import ParallelContext
from mt_moe.experts.grouped import grouped_product
from mt_moe.experts.loop import Groups, loop_product
from mt_moe.permutation import Routing, RowKernels, permute, sort_by_expert, unpermute
from mt_moe.tokens import share_tokens

DISPATCHERS = ["alltoall", "allgather"]


def output_and_gradients(layer, x: Tensor, reference: bool) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    if reference:
        routing = layer.router(share_tokens(x, layer.ctx))
        out = dense_loop(layer, x.flatten(0, 1), routing.experts, routing.weights, routing.kept).view_as(x)
    else:
        out = layer(x)
    layer.zero_grad()
    out.sin().sum().backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return out.detach(), {"x": x.grad, **gradients}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"moe_router_topk": 5},
        {"moe_expert_capacity_factor": 0.75},
        {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position"},
        {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    ],
    ids=str,
)
def test_the_layer_is_the_loop_over_tokens(dispatcher, keys) -> None:
    layer = build_layer(options(moe_token_dispatcher_type=dispatcher, **keys), fp64(), Shape(add_bias_linear=True))
    x = tokens_of(2, 9)
    out, gradients = output_and_gradients(layer, x, reference=False)
    expected, wanted = output_and_gradients(layer, x, reference=True)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-11, msg=name)


def test_both_dispatchers_are_the_same_to_the_last_bit() -> None:
    ctx, x = ParallelContext(), tokens_of(2, 9, torch.float32)
    found = [
        output_and_gradients(build_layer(options(moe_token_dispatcher_type=name), ctx), x, reference=False)
        for name in DISPATCHERS
    ]
    (out, gradients), (other, others) = found
    assert torch.equal(out, other)
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_all_tokens_on_one_expert_and_experts_without_any(dispatcher) -> None:
    keys = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": [0.0]}
    layer = build_layer(options(moe_token_dispatcher_type=dispatcher, **keys), fp64())
    with torch.no_grad():
        layer.router.weight.zero_()[3] = 1.0
    x = tokens_of(1, 6).abs()
    out, gradients = output_and_gradients(layer, x, reference=False)
    expected, wanted = output_and_gradients(layer, x, reference=True)
    torch.testing.assert_close(out, expected)
    first = gradients["experts.linear_fc1.weight"]
    torch.testing.assert_close(first, wanted["experts.linear_fc1.weight"])
    assert first[3].abs().max() > 0
    assert not first[[0, 1, 2, 4, 5, 6, 7]].any()


def test_no_tokens_at_all() -> None:
    for dispatcher in DISPATCHERS:
        layer = build_layer(options(moe_token_dispatcher_type=dispatcher), fp64(), Shape(add_bias_linear=True))
        x = torch.zeros(2, 0, HIDDEN, dtype=torch.float64, requires_grad=True)
        out = layer(x)
        assert out.shape == x.shape
        out.sum().backward()
        assert not layer.experts.linear_fc1.weight.grad.any()


def test_a_token_is_a_copy_in_each_of_its_places_and_their_sum_comes_back() -> None:
    experts = torch.tensor([[2, 0], [1, 2], [0, 3]])
    x = torch.arange(6.0).view(3, 2)
    permutation, counts = sort_by_expert(Routing(experts, torch.ones(3, 2), 4), RowKernels())
    assert counts.tolist() == [2, 1, 2, 1]
    rows = permute(x, permutation, 2)
    assert torch.equal(rows, x[[0, 2, 1, 0, 1, 2]])
    assert torch.equal(unpermute(rows, permutation, 2), 2 * x)


def test_padding_fills_every_expert_up_with_zeros() -> None:
    experts = torch.tensor([[2, 0], [1, 2], [0, 3]])
    kept = torch.tensor([[True, True], [True, False], [True, True]])
    x = torch.arange(1.0, 7.0).view(3, 2)
    permutation, counts = sort_by_expert(Routing(experts, torch.ones(3, 2), 4, kept, padded_to=2), RowKernels())
    assert counts.tolist() == [2, 2, 2, 2]
    zero = torch.zeros(2)
    rows = [x[0], x[2], x[1], zero, x[0], zero, x[2], zero]
    assert torch.equal(permute(x, permutation, 2), torch.stack(rows))
    assert torch.equal(unpermute(permute(x, permutation, 2), permutation, 2), x * torch.tensor([[2.0], [1.0], [2.0]]))


@pytest.mark.parametrize("counts", [[5, 0, 7, 1], [0, 0, 13, 0], [0, 0, 0, 0], [3, 3, 3, 3]])
def test_products_are_those_of_each_expert(counts) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), 16, generator=generator)
    weight = torch.randn(4, 24, 16, generator=generator)
    found = []
    for product, rows_of_none in (
        (loop_product, 0),
        (grouped_product, 0),
        (loop_product, 3),
        (grouped_product, 3),
        (separately, 0),
    ):
        a = torch.cat([x, torch.full((rows_of_none, 16), float("nan"))]).requires_grad_()
        b = weight.clone().requires_grad_()
        out = product(a, b, Groups(torch.tensor(counts)))[: len(x)]
        da, db = torch.autograd.grad(out.sin().sum(), [a, b])
        found.append((out.detach(), da[: len(x)], db))
    for own in found[:-1]:
        for mine, wanted in zip(own, found[-1], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def separately(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    pieces = x.split(groups.counts.tolist())
    return torch.cat([piece @ matrix.T for piece, matrix in zip(pieces, weight, strict=True)])


def test_grouped_products_serve_the_layer_too() -> None:
    x = tokens_of(2, 8, torch.float32)
    found = {}
    for name in ("loop", "grouped"):
        layer = build_layer(options(moe_grouped_gemm=name), ParallelContext())
        assert layer.experts.product == name
        assert f"product={name}" in repr(layer)
        found[name] = output_and_gradients(layer, x, reference=False)
    torch.testing.assert_close(found["grouped"], found["loop"], rtol=1e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_no_tensor_of_tokens_times_experts_times_hidden(dispatcher) -> None:
    """The largest tensor of forward and backward is that of the experts' inner rows."""
    layer = build_layer(options(moe_token_dispatcher_type=dispatcher), fp64())
    x = tokens_of(2, 64).requires_grad_()
    with Largest() as largest:
        layer(x).sum().backward()
    assert largest.elements == 128 * 2 * 2 * FFN  # tokens x top-k x both halves of SwiGLU
    assert largest.elements < 128 * EXPERTS * HIDDEN


@pytest.mark.parametrize("recomputed", ["moe", "shared_experts", "moe_act"])
def test_what_is_computed_again_changes_no_bit_and_keeps_less(recomputed) -> None:
    keys = {"moe_shared_expert_intermediate_size": 6, "moe_input_jitter_eps": 0.01}
    x, found, kept = tokens_of(2, 9, torch.float32), [], []
    for recompute in ((), (recomputed,)):
        layer = build_layer(options(**keys), ParallelContext(), recompute=recompute)
        torch.manual_seed(3)
        found.append(output_and_gradients(layer, x, reference=False))
        kept.append(kept_elements(layer, x))
        layer.router.after_step()
        assert layer.router.load.tokens.sum() == 18 * 2  # of one pass: the other had no backward
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])
    assert kept[1] < kept[0]


def kept_elements(layer, x: Tensor) -> int:
    """Of different tensors that the forward pass keeps for the backward pass."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x.clone().requires_grad_())
    assert out.requires_grad
    return sum(tensor.numel() for tensor in kept.values())


def test_shared_experts_see_every_token_and_have_a_gate() -> None:
    keys = {"moe_shared_expert_intermediate_size": 6, "moe_shared_expert_gate": True}
    layer, x = build_layer(options(**keys), fp64()), tokens_of(2, 5)
    shared = layer.shared_experts
    gate, up = (x @ shared.linear_fc1.weight.T).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ shared.linear_fc2.weight.T
    expected = expected * (x @ shared.gate_weight.T).sigmoid()
    routed = build_layer(options(), fp64())
    torch.testing.assert_close(layer(x), routed(x) + expected)


def test_latent_experts_work_on_projected_tokens() -> None:
    layer, x = build_layer(options(moe_latent_size=4), fp64()), tokens_of(1, 7)
    routing = layer.router(share_tokens(x, layer.ctx))
    latent = x[0] @ layer.fc1_latent_proj.weight.T
    expected = dense_loop(layer, latent, routing.experts, routing.weights) @ layer.fc2_latent_proj.weight.T
    torch.testing.assert_close(layer(x)[0], expected)


def test_bf16_rows_are_summed_in_fp32() -> None:
    """1 and eight times 1/512: in bf16 the small ones would vanish one by one."""
    y = torch.tensor([[1.0]] + [[2.0**-9]] * 8).bfloat16()
    places = torch.arange(9)[None]
    assert RowKernels().sum(y, places, True).item() == 1.0 + 2.0**-6
