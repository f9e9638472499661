"""What stands between the two matrices of the experts, against the formula and torch's own differentiation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.moe.moe_cases import Shape, build_layer, options, tokens_of
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.nn.kernels.choice import Kernels
from mt_core.parallel.context import ParallelContext
from mt_moe.experts.activation import plain_activation, tiled_swiglu


def formula(inner: Tensor, weights: Tensor) -> Tensor:
    gate, up = inner.chunk(2, 1)
    return gate * torch.sigmoid(gate) * up * weights[:, None]


def results(function, inner: Tensor, weights: Tensor) -> list[Tensor]:
    """Output, and gradients of both inputs for the output's gradient 1, 2, 1, 2 ..."""
    a, b = inner.clone().requires_grad_(), weights.clone().requires_grad_()
    out = function(a, b)
    grad = 1 + torch.arange(out.numel()).view(out.shape) % 2
    return [out.detach(), *torch.autograd.grad(out, [a, b], grad.to(out.dtype))]


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 100])
def test_swiglu_in_tiles_is_its_formula(rows: int, monkeypatch) -> None:
    """Tiles of two rows: the last one is not full."""
    monkeypatch.setattr("mt_moe.experts.activation.TILE_ELEMENTS", 10)
    generator = torch.Generator().manual_seed(rows)
    inner = 4 * torch.randn(rows, 10, dtype=torch.float64, generator=generator)
    weights = torch.rand(rows, dtype=torch.float64, generator=generator)
    mine, wanted = results(tiled_swiglu, inner, weights), results(formula, inner, weights)
    torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-13)


def test_large_gates_have_the_limits_of_the_formula() -> None:
    inner = torch.tensor([[-200.0, 3.0], [200.0, 3.0]])
    out, d_inner, d_weights = results(tiled_swiglu, inner, torch.tensor([0.25, 0.5]))
    torch.testing.assert_close(out, torch.tensor([[0.0], [300.0]]))
    torch.testing.assert_close(d_inner, torch.tensor([[0.0, 0.0], [3.0, 200.0]]))  # the second row's gradient is 2
    torch.testing.assert_close(d_weights, torch.tensor([0.0, 1200.0]))


def test_16_bit_rows_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    inner = torch.randn(64, 40, generator=generator).bfloat16()
    weights = torch.rand(64, generator=generator)
    mine, wanted = results(tiled_swiglu, inner, weights), results(formula, inner.float(), weights)
    assert [x.dtype for x in mine] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert torch.equal(mine[0], (F.silu(inner[:, :20].float()) * inner[:, 20:] * weights[:, None]).bfloat16())
    torch.testing.assert_close(mine[1].float(), wanted[1], rtol=2**-8, atol=1e-6)  # half of bf16's last place
    torch.testing.assert_close(mine[2], wanted[2])


@pytest.mark.parametrize("name", ["swiglu", "geglu", "clamped_swiglu", "squared_relu", "gelu"])
def test_activations_of_any_device_are_those_of_the_cpu(name: str) -> None:
    inner = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    weights = torch.linspace(0.1, 0.9, 5)
    mine, wanted = (results(plain_activation(name, device), inner, weights) for device in ("cpu", "cuda"))
    torch.testing.assert_close(mine, wanted)


def test_experts_take_the_configured_kernel_and_count_as_using_it() -> None:
    experts = build_layer(options(), ParallelContext()).experts
    kernels = Kernels({"activation": "torch"}, "cpu", "float32")
    experts.use_kernels(kernels)
    assert experts.activate is tiled_swiglu
    kernels.require_used(kernels.picked)
    with pytest.raises(ConfigError, match=r"kernels\.activation=triton cannot serve"):
        experts.use_kernels(Kernels({"activation": "triton"}, "cpu", "float32"))


def test_a_kernel_of_another_package_gets_the_rows_and_its_output_is_weighted(monkeypatch) -> None:
    experts = build_layer(options(), ParallelContext()).experts
    kernels = Kernels({}, "cpu", "float32")
    monkeypatch.setattr(kernels, "pick", lambda *_, **__: lambda x, bias, name: x[:, :2] + len(name))
    experts.use_kernels(kernels)
    assert torch.equal(experts.activate(torch.ones(1, 4), torch.tensor([2.0])), torch.full((1, 2), 14.0))


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize("product", ["loop", "grouped"])
def test_a_recomputed_activation_leaves_its_output_unkept(activation: str, product: str) -> None:
    """Without it the experts keep the rows between their matrices; with it nothing of [rows, FFN]."""
    x = tokens_of(2, 8, torch.float32)
    found = []
    for recompute in ((), ("moe_act",), ("moe", "moe_act"), ("moe",)):
        shape = Shape(ffn_size=20, activation=activation)
        layer = build_layer(options(moe_grouped_gemm=product), ParallelContext(), shape, recompute)
        kept: list[tuple[int, ...]] = []
        value = x.clone().requires_grad_()

        def keep(tensor: Tensor, kept: list[tuple[int, ...]] = kept) -> Tensor:
            kept.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = layer(value)
        gradients = torch.autograd.grad(out.sin().sum(), [value, *layer.parameters()])
        found.append((kept.count((32, 20)), [out, *gradients]))
    assert [count for count, _ in found[1:]] == [0, 0, 0]
    assert found[0][0] > 0
    for _, values in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values, found[0][1], strict=True))
