"""Products that add weight gradients to fp32 sums: against fp64, against 16-bit gradients, and with all that backward
passes do. Operands are 16-bit numbers, so that fp64 products of them are what an exact sum would give."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from mt_core.nn.kernels.chunked_loss import chunked_weighted_sum
from mt_core.nn.kernels.reference.cross_entropy import ROWS
from mt_core.nn.layout import LayoutModule, ParameterLayout, initialize, normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear, linear
from mt_core.nn.main_grad import call_after_gradient, main_gradient_of, with_main_gradient
from mt_core.optim.buckets import Bucket
from mt_core.optim.master_weights import Fp32MasterWeights, Fp32Weights, build_master_weights
from mt_core.optim.param_and_grad_buffer import BufferOptions, ParamAndGradBuffer
from mt_core.parallel.context import SINGLE, AxisSizes, ParallelContext, build_parallel_context
from mt_core.parallel.pipeline.split_backward import backward_of_inputs
from mt_core.testing import run_ranks

IN, OUT, BATCH, SEQUENCE = 24, 40, 2, 4
BF16 = ParallelContext(params_dtype=torch.bfloat16)
BUFFERED = BufferOptions(bucket_elements=1)
"""Each parameter is a bucket."""


class Pair(nn.Module):
    """y = W2 (W1 x + b)"""

    def __init__(self, ctx: ParallelContext, bias: bool = True) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(IN, OUT, ctx, bias=bias, init=normal(0.2))
        self.down = RowParallelLinear(OUT, IN, ctx, bias=bias, init=normal(0.2))
        initialize(self, 3, ctx)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def activations(number: int, features: int = IN, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, SEQUENCE, features, generator=generator).to(dtype)


def one_layer(dtype: torch.dtype = torch.bfloat16) -> ColumnParallelLinear:
    ctx = ParallelContext(params_dtype=dtype)
    layer = ColumnParallelLinear(IN, OUT, ctx, bias=False, init=normal(0.2))
    initialize(layer, 3, ctx)
    return layer


def exact(passes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The sum over micro-batches of dy^T x in fp64, for `run_passes`."""
    pairs = [(activations(100 + n, OUT, dtype), activations(n, IN, dtype)) for n in range(passes)]
    return sum(dy.double().flatten(0, 1).T @ x.double().flatten(0, 1) for dy, x in pairs)


def run_passes(layer: nn.Module, passes: int, dtype: torch.dtype = torch.bfloat16) -> None:
    for number in range(passes):
        layer(activations(number, IN, dtype)).backward(activations(100 + number, OUT, dtype))


def without_main_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if main_gradient_of(parameter) is not None:
            del parameter.main_grad


def gradients(weights: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in weights.named_parameters()}


def build(kind: str, model: nn.Module) -> Any:
    weights = Fp32MasterWeights(model) if kind == "copies" else ParamAndGradBuffer(model, BF16, BUFFERED)
    weights.zero_grad()
    return weights


KINDS = pytest.mark.parametrize("kind", ["copies", "buckets"])


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_over_micro_batches_is_that_of_fp64_within_fp32_rounding(kind, dtype) -> None:
    layer = one_layer(dtype)
    weights = build(kind, layer)
    run_passes(layer, 8, dtype)
    weights.reduce()
    ((_, main),) = weights.named_parameters()
    reference = exact(8, dtype)
    assert main.grad.dtype == torch.float32
    assert (main.grad.double() - reference).abs().max() < 1e-6 * reference.abs().max()


@KINDS
def test_it_is_much_closer_than_the_sum_of_16_bit_gradients(kind) -> None:
    errors = []
    for fused in (True, False):
        layer = one_layer()
        weights = build(kind, layer)
        if not fused:
            without_main_gradients(layer)
        run_passes(layer, 8)
        weights.reduce()
        errors.append((gradients(weights)["weight"].double() - exact(8)).norm())
    assert errors[0] < 1e-3 * errors[1]


@KINDS
def test_the_first_gradient_of_a_step_is_written_over_what_was_there(kind) -> None:
    """Nothing is zeroed before; a weight without a gradient gets zeros when gradients are reduced."""
    pair = Pair(BF16, bias=True)
    weights = build(kind, pair)
    for parameter in pair.parameters():
        parameter.main_grad._total.fill_(float("nan"))
    run_passes(pair.up, 2)
    weights.reduce()
    found = gradients(weights)
    assert (found["up.weight"].double() - exact(2)).abs().max() < 1e-6 * exact(2).abs().max()
    assert bool(found["up.bias"].isfinite().all())  # by autograd and a hook
    assert not found["down.weight"].any()


@pytest.mark.parametrize("make", [Fp32MasterWeights, lambda model: ParamAndGradBuffer(model, BF16, BufferOptions())])
def test_main_gradients_that_are_zeroed_at_once_are_zeroed_by_one_operation(make) -> None:
    pair = Pair(BF16)
    weights = make(pair)
    mains = [main_gradient_of(parameter) for parameter in pair.parameters()]
    for main in mains[1:]:
        main.zero_at_once()
    run_passes(pair.up, 1)
    pair.down(activations(0, OUT)).sum().backward()
    with Operations() as operations:
        weights.zero_grad()
    assert operations.names == ["aten::_foreach_zero_"]
    assert not any(main._total.any() for main in mains[1:])
    assert mains[0]._is_cleared
    assert mains[0]._total.any()


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def of_a_sum_of_losses(x: Tensor, weight: Tensor) -> Tensor:
    columns, ones = torch.zeros(len(x), dtype=torch.int64), torch.ones(len(x))
    return chunked_weighted_sum(x, weight, columns, ones, SINGLE, ROWS)[0]


USES = {
    "a sum of losses": of_a_sum_of_losses,
    "padded rows": lambda x, weight: linear(x, with_main_gradient(weight, lambda rows: rows[: OUT - 3]), None).sum(),
    "another shape": lambda x, weight: linear(x, with_main_gradient(weight, lambda rows: rows.flatten(1)), None).sum(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_zeros_are_written_before_the_first_gradient_of(use) -> None:
    """What was there is not read, rows without a gradient are zeroed, and the next micro-batch adds."""
    layer = one_layer()
    weights = build("copies", layer)
    main = main_gradient_of(layer.weight)
    main._total.fill_(float("nan"))
    x = activations(0).flatten(0, 1)
    loss = use(x, layer.weight)
    assert main._is_cleared
    with Zeroed() as zeroed:
        loss.backward()
    assert max(zeroed.sizes, default=0) < OUT * IN
    once = gradients(weights)["weight"]
    use(x, layer.weight).backward()
    weights.reduce()
    assert once.any()
    torch.testing.assert_close(gradients(weights)["weight"], 2 * once)
    wide = layer.weight.detach().float().requires_grad_()
    use(x.float(), wide).backward()
    torch.testing.assert_close(once, wide.grad, atol=0.05, rtol=0.05)


class Zeroed(TorchDispatchMode):
    """Numbers of elements that operations set to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zero_.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


class New16Bits(TorchDispatchMode):
    """Numbers of elements of 16-bit tensors in memory that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.itemsize == 2 and x.untyped_storage().data_ptr() not in given:
                self.sizes.append(x.numel())
        return result


@KINDS
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "the test of the test"])
def test_no_16_bit_gradient_of_a_weights_size_is_made(kind, fused) -> None:
    pair = Pair(BF16)
    build(kind, pair)
    if not fused:
        without_main_gradients(pair)
    x = activations(0).requires_grad_()
    assert max(x.numel(), BATCH * SEQUENCE * OUT) < IN * OUT
    out = pair(x)
    with New16Bits() as spy:
        out.backward(activations(1))
    assert (IN * OUT in spy.sizes) is not fused
    assert x.numel() in spy.sizes


def reference_gradients(pair: Pair, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """By autograd in fp64 on the same numbers, but for the 16 bits that activations between the layers have."""
    double = {name: p.detach().double().requires_grad_() for name, p in pair.named_parameters()}
    hidden = F.linear(x.double(), double["up.weight"], double.get("up.bias"))
    F.linear(hidden, double["down.weight"], double.get("down.bias")).backward(dy.double())
    return {name: p.grad for name, p in double.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 0.01) -> None:
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        assert (found[name].double() - reference).norm() < bound * reference.norm(), name


@KINDS
@pytest.mark.parametrize("bias", [True, False])
def test_every_gradient_of_two_layers(kind, bias) -> None:
    pair = Pair(BF16, bias)
    weights = build(kind, pair)
    x = activations(0).requires_grad_()
    pair(x).backward(activations(1))
    weights.reduce()
    assert_close(gradients(weights), reference_gradients(pair, activations(0), activations(1)))
    expected = activations(1).double() @ pair.down.weight.double() @ pair.up.weight.double()
    assert (x.grad.double() - expected).norm() < 0.01 * expected.norm()


@KINDS
def test_recomputation_adds_each_product_once(kind) -> None:
    found = []
    for recompute in (False, True):
        pair = Pair(BF16)
        weights = build(kind, pair)
        x = activations(0).requires_grad_()
        out = checkpoint(pair, x, use_reentrant=False) if recompute else pair(x)
        out.backward(activations(1))
        weights.reduce()
        found.append(gradients(weights))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@KINDS
def test_a_split_backward_pass_adds_products_in_its_second_part_alone(kind) -> None:
    whole, pair = Pair(BF16), Pair(BF16)
    expected = build(kind, whole)
    whole(activations(0).requires_grad_()).backward(activations(1))
    expected.reduce()
    weights = build(kind, pair)
    x = activations(0).requires_grad_()
    _, second = backward_of_inputs([get_gradient_edge(pair(x))], [activations(1)], [x])
    assert not main_gradient_of(pair.up.weight).total.any()
    assert not main_gradient_of(pair.down.weight).total.any()
    second()
    weights.reduce()
    found = gradients(weights)
    assert all(torch.equal(found[name], value) for name, value in gradients(expected).items())


class Tied(LayoutModule):
    """Token embeddings that are also the LM head, here used twice as that."""

    def __init__(self) -> None:
        super().__init__(BF16)
        self.declare("weight", ParameterLayout((OUT, IN), normal(0.2)))
        initialize(self, 3, BF16)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.weight)
        return linear(x, self.weight, None) + linear(-0.5 * x, self.weight, None)


IDS = torch.tensor([[1, 5, 5, 0]])


def tied_reference() -> Tensor:
    weight = Tied().weight.detach().double().requires_grad_()
    x = F.embedding(IDS, weight)
    (F.linear(x, weight) + F.linear(-0.5 * x, weight)).square().sum().backward()
    return weight.grad


@KINDS
def test_a_tied_weight_gets_the_gradients_of_all_its_uses(kind) -> None:
    model = Tied()
    weights = build(kind, model)
    model(IDS).square().sum().backward()
    weights.reduce()
    assert_close(gradients(weights), {"weight": tied_reference()}, 0.02)


def test_a_weight_is_complete_once_a_pass_after_the_last_of_its_uses() -> None:
    model = Tied()
    weights = build("copies", model)
    seen: list[Tensor] = []
    kept = call_after_gradient(model.weight, lambda: seen.append(gradients(weights)["weight"]))
    model(IDS).square().sum().backward()
    linear(activations(0), model.weight, None).sum().backward()
    assert kept is not None
    assert len(seen) == 2
    # What goes through the embedding is added by a hook of autograd's, before this one.
    assert_close({"weight": seen[0]}, {"weight": tied_reference()}, 0.02)


def test_fp32_training_is_what_it_was() -> None:
    ctx = ParallelContext()
    pair, plain = Pair(ctx), Pair(ctx)
    for weights in (build_master_weights(pair), ParamAndGradBuffer(pair, ctx, BUFFERED)):
        assert isinstance(weights, Fp32Weights | ParamAndGradBuffer)
        assert all(main_gradient_of(parameter) is None for parameter in pair.parameters())
        weights.zero_grad()
        plain.zero_grad()
        for number in range(3):
            pair(activations(number, dtype=torch.float32)).square().sum().backward()
            x = activations(number, dtype=torch.float32)
            hidden = F.linear(x, plain.up.weight, plain.up.bias)
            F.linear(hidden, plain.down.weight, plain.down.bias).square().sum().backward()
        weights.reduce()
        for name, parameter in plain.named_parameters():
            assert torch.equal(gradients(weights)[name], parameter.grad), name


def test_sums_in_the_format_of_the_weights_are_left_to_autograd() -> None:
    pair = Pair(BF16)
    ParamAndGradBuffer(pair, BF16, BufferOptions(accumulate_in_fp32=False))
    assert all(main_gradient_of(parameter) is None for parameter in pair.parameters())


def test_a_frozen_weight_gets_nothing_and_a_pass_without_gradients_keeps_nothing() -> None:
    pair = Pair(BF16)
    build("copies", pair)
    pair.up.weight.requires_grad_(False)
    pair(activations(0).requires_grad_()).backward(activations(1))
    assert not main_gradient_of(pair.up.weight).total.any()
    assert main_gradient_of(pair.down.weight).total.any()
    with torch.no_grad():
        assert pair(activations(0)).grad_fn is None


@pytest.mark.slow
def test_compiled_layers_leave_accumulation_to_autograd() -> None:
    layer = one_layer()
    weights = build("copies", layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    compiled(activations(0)).backward(activations(100, OUT))
    found = gradients(weights)["weight"]
    assert torch.equal(found, found.bfloat16().float())
    assert_close({"weight": found}, {"weight": exact(1)})


def test_a_second_derivative_is_refused() -> None:
    layer = one_layer()
    build("copies", layer)
    x = activations(0).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@KINDS
def test_main_weights_that_are_let_go_are_freed(kind) -> None:
    """The node of a weight, its hook and the master weights hold one another."""
    pair = Pair(BF16)
    weights = build(kind, pair)
    pair(activations(0)).sum().backward()
    gone = weakref.ref(weights)
    del weights, pair
    gc.collect()
    assert gone() is None


# -- several ranks ------------------------------------------------------------------------------------


def overlapped(rank: int, world: int, passes: int) -> tuple[dict[str, Tensor], list[list[bool]], list[int]]:
    """Gradients after the sum over ranks; after each pass which buckets are on their way; how often each was sent."""
    ctx = build_parallel_context(AxisSizes(), params_dtype=torch.bfloat16)
    pair = Pair(ctx)
    weights = ParamAndGradBuffer(pair, ctx, BUFFERED)
    started: list[Bucket] = []
    send = Bucket.start_reduce
    Bucket.start_reduce = lambda bucket: (started.append(bucket), send(bucket))[1]
    weights.zero_grad()
    weights.expect(passes)
    states = []
    for number in range(passes):
        pair(activations(10 * rank + number)).backward(activations(50))
        states.append([bucket in started for bucket in weights.buckets])
    weights.reduce()
    return gradients(weights), states, [started.count(bucket) for bucket in weights.buckets]


@pytest.mark.slow
@pytest.mark.dist
def test_buckets_are_sent_once_and_by_the_last_pass() -> None:
    expected: dict[str, Tensor] = {}
    for number in (0, 1, 10, 11):
        of_pass = reference_gradients(Pair(BF16), activations(number), activations(50))
        expected = {name: expected.get(name, 0) + value for name, value in of_pass.items()}
    for found, states, sent in run_ranks(2, overlapped, 2):
        assert states == [[False] * 4, [True] * 4]
        assert sent == [1] * 4
        assert_close(found, expected)


def over_tensor_ranks(rank: int, world: int, divided: bool, split: bool) -> tuple[dict[str, Tensor], Tensor]:
    ctx = build_parallel_context(AxisSizes(tp=world), sequence_parallel=divided, params_dtype=torch.bfloat16)
    pair = Pair(ctx, bias=False)
    weights = Fp32MasterWeights(pair)
    share = slice(rank * SEQUENCE // world, (rank + 1) * SEQUENCE // world) if divided else slice(None)
    x, dy = activations(0)[:, share].clone().requires_grad_(), activations(1)[:, share]
    if split:
        (dx,), second = backward_of_inputs([get_gradient_edge(pair(x))], [dy], [x])
        assert not any(value.any() for value in gradients(weights).values())
        second()
    else:
        pair(x).backward(dy)
        dx = x.grad
    assert all(parameter.grad is None for parameter in pair.parameters())
    return gradients(weights), dx


@pytest.mark.dist
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("divided", [False, True], ids=["tensor", "sequence"])
def test_layers_divided_over_ranks(divided, split) -> None:
    whole = Pair(BF16, bias=False)
    expected = reference_gradients(whole, activations(0), activations(1))
    expected_dx = activations(1).double() @ whole.down.weight.double() @ whole.up.weight.double()
    for rank, (found, dx) in enumerate(run_ranks(2, over_tensor_ranks, divided, split)):
        own = {"up.weight": expected["up.weight"].chunk(2, 0), "down.weight": expected["down.weight"].chunk(2, 1)}
        assert_close(found, {name: pieces[rank] for name, pieces in own.items()})
        reference = expected_dx.chunk(2, 1)[rank] if divided else expected_dx
        assert (dx.double() - reference).norm() < 0.02 * reference.norm()
