"""Cross entropy, also divided over the vocabulary, and the one that never holds the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.core.nn.kernels.comparison import assert_agrees, random
from tests.core.nn.kernels.interpreter import implementation, run_interpreted
from tests.core.operator_bytes import OperatorBytes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mt_core._torch_compat import uncompiled_references
from mt_core.nn.kernels.chunked_loss import rows_of_chunk
from mt_core.nn.linear import linear
from mt_core.nn.main_grad import attach_main_grad, clear_all
from mt_core.parallel.collectives import copy_to
from mt_core.parallel.context import Axis, AxisSizes, build_parallel_context

IMPLEMENTATIONS = ("torch", "triton")
ALONE = Axis()


def losses_of(logits: Tensor, columns: Tensor) -> Tensor:
    """-log softmax, written out; columns outside have no logit of their own."""
    shifted = logits - logits.max(-1, keepdim=True).values
    here = (columns >= 0) & (columns < logits.shape[-1])
    label = (logits * torch.nn.functional.one_hot(columns.clamp(0, logits.shape[-1] - 1), logits.shape[-1])).sum(-1)
    return shifted.exp().sum(-1).log() + logits.max(-1).values - label * here


def labels(rows: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(3))


def check_cross_entropy(rank: int, world: int, name: str) -> None:
    kernel = implementation("cross_entropy", name)
    for rows, vocabulary in ((5, 37), (1, 1), (3, 5000), (0, 7)):
        for overwrite in (False, True):
            columns = labels(rows, vocabulary)
            for dtype in (torch.float32, torch.bfloat16):
                logits = random(rows, vocabulary, dtype=dtype)
                assert_agrees(
                    lambda x, c=columns, o=overwrite: kernel(x * 1, c, ALONE, o),
                    lambda x, c=columns: losses_of(x, c),
                    logits,
                )
    outside = torch.tensor([-1, 37, 5, -3000, 36])
    assert_agrees(lambda x: kernel(x, outside, ALONE), lambda x: losses_of(x, outside), random(5, 37))


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_cross_entropy(name: str) -> None:
    run_interpreted(check_cross_entropy, name)


def check_extremes(rank: int, world: int, name: str) -> None:
    kernel = implementation("cross_entropy", name)
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [float("-inf"), 2.0, 2.0]])
    losses = kernel(logits, torch.tensor([1, 0, 1]), ALONE)
    assert torch.allclose(losses, torch.tensor([2e4, 1.098612, 0.693147]))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_large_and_hidden_logits(name: str) -> None:
    run_interpreted(check_extremes, name)


def check_gaps(rank: int, world: int) -> None:
    """Between rows of logits, as a padded vocabulary leaves them on a GPU: nothing of them counts or is written."""
    memory = random(5, 16).detach()
    memory[:, 9:] = float("nan")
    before, target = memory.clone(), labels(5, 9)
    logits = memory[:, :9].requires_grad_()
    for overwrite in (False, True):
        logits.grad = None
        losses = implementation("cross_entropy", "triton")(logits, target, ALONE, overwrite)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        exact = logits.detach().double().requires_grad_()
        losses_of(exact, target).sum().backward()
        assert torch.allclose(losses.double(), losses_of(exact, target), atol=1e-5)
        assert torch.allclose(gradient.double(), exact.grad, atol=1e-6)
        assert gradient.stride() == (16, 1)
        assert torch.equal(memory.nan_to_num(7.0), before.nan_to_num(7.0))
    # The last row ends where the memory does: there is nothing to read behind it.
    ends = torch.empty(4 * 16 + 9).as_strided((5, 9), (16, 1)).copy_(memory[:, :9])
    assert torch.allclose(implementation("cross_entropy", "triton")(ends, target, ALONE), losses.detach())


def test_logits_whose_rows_are_apart_in_memory() -> None:
    run_interpreted(check_gaps)


def check_overwriting(rank: int, world: int) -> str:
    """Another operation that kept the logits for its backward pass must not get their gradient instead."""
    logits = random(4, 9) * 1
    squares = (logits * logits).sum()
    losses = implementation("cross_entropy", "triton")(logits, labels(4, 9), ALONE, True).sum()
    losses.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as caught:
        squares.backward()
    return str(caught.value)


def test_logits_that_were_overwritten_are_not_used_in_silence() -> None:
    (message,) = run_interpreted(check_overwriting)
    assert "modified by an inplace operation" in message


def check_parallel(rank: int, world: int) -> dict[str, float]:
    """Largest difference from the whole vocabulary in fp64. Two ranks hold 15 and 14 of 29 ids; four 13, 13, 3, 0."""
    axis = build_parallel_context(AxisSizes(tp=world)).tp
    share = 15 if world == 2 else 13
    ids = slice(min(rank * share, 29), min((rank + 1) * share, 29))
    hidden, weight, target = random(11, 6), random(29, 6), labels(11, 29)
    factor = torch.linspace(0, 1, 11)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = losses_of(exact[0] @ exact[1].T, target)
    (wanted * factor).sum().backward()
    assert exact[0].grad is not None
    assert exact[1].grad is not None

    found = {}
    for name in IMPLEMENTATIONS:
        for kernel in ("cross_entropy", "linear_cross_entropy", "linear_cross_entropy_sum"):
            given, own = hidden.detach().requires_grad_(), weight.detach()[ids].requires_grad_()
            function = implementation(kernel, name)
            shared, columns = copy_to(given, axis), target - ids.start
            # Rows of padding, of which nothing but the gradient 0 may be seen.
            filler = torch.nan if kernel == "cross_entropy" else 3.0
            padded = torch.cat([own, torch.full((16 - len(own), 6), filler)])
            if kernel == "linear_cross_entropy_sum":
                total, losses = function(shared, padded, columns, factor, axis, 4, ids=len(own))
            else:
                operands, named = (
                    ((linear(shared, padded, None, len(own)),), {})
                    if kernel == "cross_entropy"
                    else ((shared, padded), {"ids": len(own)})
                )
                losses = function(*operands, columns, axis, **named)
                total = (losses * factor).sum()
            total.backward()
            assert given.grad is not None
            assert own.grad is not None
            pairs = ((losses, wanted), (given.grad, exact[0].grad), (own.grad, exact[1].grad[ids]))
            found[f"{name} {kernel}"] = max((a - b).abs().max().item() for a, b in pairs if a.numel())
            found[f"{name} {kernel} total"] = abs(total.item() - (wanted * factor).sum().item())
    return found


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
def test_vocabulary_over_ranks(ranks: int) -> None:
    for found in run_interpreted(check_parallel, ranks=ranks):
        assert len(found) == 12
        assert max(found.values()) < 2e-5, found


def check_linear(rank: int, world: int, name: str) -> None:
    function, total_of = (implementation(k, name) for k in ("linear_cross_entropy", "linear_cross_entropy_sum"))
    for tokens, chunk in ((11, 4), (8, 4), (1, 128), (3, 1), (0, 4)):
        hidden, weight, columns = random(tokens, 6), random(37, 6), labels(tokens, 37)
        factor = torch.linspace(-1, 2, tokens)
        assert_agrees(
            lambda h, w, c=columns, n=chunk: function(h, w, c, ALONE, n),
            lambda h, w, c=columns: losses_of(h @ w.T, c),
            hidden,
            weight,
        )
        assert_agrees(
            lambda h, w, c=columns, n=chunk, f=factor: total_of(h, w, c, f, ALONE, n)[0] * 3,
            lambda h, w, c=columns, f=factor: (losses_of(h @ w.T, c) * f).sum() * 3,
            hidden,
            weight,
        )
        assert_agrees(
            lambda h, w, c=columns, n=chunk: function(h, w, c.clamp(max=30), ALONE, n, ids=31),
            lambda h, w, c=columns: losses_of(h @ w[:31].T, c.clamp(max=30)),
            hidden,
            weight,
        )
        assert_agrees(
            lambda h, w, c=columns, n=chunk, f=factor: total_of(h, w, c.clamp(max=30), f, ALONE, n, ids=31)[0],
            lambda h, w, c=columns, f=factor: (losses_of(h @ w[:31].T, c.clamp(max=30)) * f).sum(),
            hidden,
            weight,
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_linear_cross_entropy(name: str) -> None:
    run_interpreted(check_linear, name)


class Allocations(TorchDispatchMode):
    """Bytes of the largest memory that any operation returned a tensor in."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return result


def check_allocations(rank: int, world: int) -> dict[str, list[int]]:
    """64 tokens, 500 ids, 8 hidden, 16 tokens at a time."""
    hidden, weight, columns = random(64, 8), random(500, 8), labels(64, 500)
    found = {}
    for name in IMPLEMENTATIONS:
        linear, total_of, whole = (
            implementation(kernel, name)
            for kernel in ("linear_cross_entropy", "linear_cross_entropy_sum", "cross_entropy")
        )
        calls = (
            lambda f=linear: f(hidden, weight, columns, ALONE, 16).sum(),
            lambda f=total_of: f(hidden, weight, columns, torch.ones(64), ALONE, 16)[0],
            lambda f=whole: f(hidden @ weight.T, columns, ALONE).sum(),
        )
        found[name] = []
        for call in calls:
            with Allocations() as seen:
                call().backward()
            found[name].append(seen.largest)
    return found


@pytest.mark.slow
def test_no_tensor_of_the_logits_size() -> None:
    """Recomputed, in the forward pass, and for comparison the loss of whole logits."""
    (found,) = run_interpreted(check_allocations)
    chunk, whole = 4 * 16 * 500, 4 * 64 * 500
    assert found == {name: [chunk, chunk, whole] for name in IMPLEMENTATIONS}


def test_a_weighted_sum_has_one_backward_pass() -> None:
    total, _ = implementation("linear_cross_entropy_sum", "torch")(
        random(4, 3), random(7, 3), labels(4, 7), torch.ones(4), ALONE
    )
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        total.backward()


def test_default_chunks_are_whole_tiles_within_the_budget() -> None:
    with torch.device("meta"):
        hidden, weight = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(128256, 4096, dtype=torch.bfloat16)
        rows = rows_of_chunk(hidden, weight)
        assert rows == 4096
        assert rows * 128256 * 2 <= 2**30
        assert rows_of_chunk(hidden, torch.empty(10**8, 1)) == 128


class ShapeOnGPU(Tensor):
    """A tensor of the meta device whose gradient is added up as on a GPU: in fp32, from operands in 16 bits."""

    is_cuda = True


def shape_on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(ShapeOnGPU)


@pytest.mark.slow
def test_fp32_traffic_on_the_gradient_of_an_lm_head() -> None:
    """Of Llama 3 8B. The first chunk of 4096 tokens writes the gradient, the second reads and writes it; then it is
    read and written to the main gradient, which is cleared and not read."""
    size = (128256, 4096)
    hidden, weight = shape_on_gpu(8192, size[1]).requires_grad_(), nn.Parameter(shape_on_gpu(*size))
    main = attach_main_grad(weight, shape_on_gpu(*size, dtype=torch.float32))
    assert main is not None
    clear_all([main])
    columns, factor = (torch.empty(8192, dtype=dtype, device="meta") for dtype in (torch.int64, torch.float32))
    with uncompiled_references(), OperatorBytes(lambda x: x.dtype == torch.float32 and x.shape == size) as moved:
        total, _ = implementation("linear_cross_entropy_sum", "torch")(hidden, weight, columns, factor, ALONE)
        forward = moved.bytes
        total.backward()
    assert (round(forward / 1e9, 1), round(moved.bytes / 1e9, 1)) == (6.3, 10.5)


def count_exponentials(rank: int, world: int, width: int) -> list[float]:
    """A logit, of the lanes that compute one: as the kernel is launched, and with a running maximum that is updated at
    every number of a lane."""
    from triton.runtime.interpreter import InterpreterBuilder

    from mt_core.nn.kernels.triton_kernels import cross_entropy

    counted, exp = 0, InterpreterBuilder.create_exp

    def count(self: Any, x: Any) -> Any:
        nonlocal counted
        counted += x.data.size
        return exp(self, x)

    InterpreterBuilder.create_exp = count
    logits, found = random(1, width).detach(), []
    for depth in (cross_entropy._DEPTH, 1):
        cross_entropy._DEPTH, counted = depth, 0
        cross_entropy.statistics(logits, labels(1, width), width)
        found.append(round(counted / width, 2))
    return found


@pytest.mark.slow
def test_exponentials_of_a_logit() -> None:
    """1 + 1/4 and 1 + 1, besides those of lanes behind the last logit and of the sum over lanes."""
    assert run_interpreted(count_exponentials, 128256) == [[1.29, 2.03]]


def test_gradients_of_the_references_by_finite_differences() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    columns = torch.tensor([0, 4, 7])
    assert torch.autograd.gradcheck(lambda x: implementation("cross_entropy", "torch")(x, columns, ALONE), logits)
    hidden = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    linear = implementation("linear_cross_entropy", "torch")
    assert torch.autograd.gradcheck(lambda h, w: linear(h, w, columns, ALONE, 2), (hidden, weight))
