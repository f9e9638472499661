"""Every product that adds its weight's gradient to an fp32 sum: against fp64 products of the same 16-bit numbers, and
with all that backward passes do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from tests.core.nn.test_main_gradients import BF16, KINDS, New16Bits, build, gradients, without_main_gradients
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from mt_core.config.schema import PrecisionConfig
from mt_core.nn.embedding import VocabRange, project_to_vocab
from mt_core.nn.fp8.multiply import Fp8Multiply, emulated_product
from mt_core.nn.fp8.options import Fp8Options
from mt_core.nn.kernels.chunked_loss import chunked_losses, chunked_weighted_sum
from mt_core.nn.kernels.reference.cross_entropy import ROWS
from mt_core.nn.kernels.vocab_parallel import RowKernels
from mt_core.nn.layout import LayoutModule, ParameterLayout, initialize, normal
from mt_core.nn.linear import linear
from mt_core.nn.main_grad import call_after_gradient, main_gradient_of, with_main_gradient
from mt_core.parallel.context import SINGLE
from mt_core.parallel.pipeline.split_backward import backward_of_inputs
from mt_models.blocks.linear import whole_linear
from mt_moe.experts.fp8 import EmulatedGroups, Fp8GroupedProduct
from mt_moe.experts.grouped import grouped_product
from mt_moe.experts.loop import Groups, loop_product

IN, OUT, ROWS_OF_X = 32, 48, 12
UNEVEN, EVEN, IDLE = (5, 0, 6, 1), (3, 3, 3, 3), (0, 0, 12, 0)
PADDED = 56
IDS = VocabRange(0, 45)


@dataclass(frozen=True)
class Case:
    """A weight's shape, x [ROWS_OF_X, in] times it, and the same with nothing but torch."""

    shape: tuple[int, ...]
    product: Callable[[Tensor, Tensor], Tensor]
    plain: Callable[[Tensor, Tensor], Tensor]


def of_experts(product: Callable[[Tensor, Tensor, Groups], Tensor], counts: tuple[int, ...]) -> Case:
    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(counts), weight, strict=True)])

    return Case((len(counts), OUT, IN), lambda x, w: product(x, w, Groups(torch.tensor(counts))), plain)


def in_fp8(x: Tensor, weight: Tensor) -> Tensor:
    options = Fp8Options(PrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise"), "emulated", 1)
    multiply = Fp8Multiply(options.scaling(None), emulated_product, "none", wgrad_in_fp8=False)
    return multiply(x, weight, None, BF16)


def patches(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, with_main_gradient(weight, lambda kernel: kernel.flatten(1)), None)


CASES = {
    "replicated": Case((OUT, IN), lambda x, w: whole_linear(x, w, None, BF16), F.linear),
    "kernel of a convolution": Case((OUT, 2, 4, 4), patches, lambda x, w: F.linear(x, w.flatten(1))),
    "padded rows": Case(
        (PADDED, IN), lambda x, w: project_to_vocab(x, w, IDS, BF16), lambda x, w: F.linear(x, w[: len(IDS)])
    ),
    "fp8": Case((OUT, IN), in_fp8, F.linear),
    "loop": of_experts(loop_product, UNEVEN),
    "loop, equal numbers": of_experts(loop_product, EVEN),
    "loop, idle experts": of_experts(loop_product, IDLE),
    "grouped": of_experts(grouped_product, UNEVEN),
    "grouped, idle experts": of_experts(grouped_product, IDLE),
    "experts in fp8": of_experts(Fp8GroupedProduct(EmulatedGroups(), 0, wgrad_in_fp8=False), UNEVEN),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class OneWeight(LayoutModule):
    def __init__(self, case: Case) -> None:
        super().__init__(BF16)
        self.product = case.product
        self.declare("weight", ParameterLayout(case.shape, normal(0.2)))
        initialize(self, 3, BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run_pass(model: OneWeight, number: int) -> None:
    out = model(numbers(number, ROWS_OF_X, IN).requires_grad_())
    out.backward(numbers(100 + number, *out.shape))


def in_fp64(case: Case, passes: int) -> Tensor:
    weight = torch.zeros(case.shape, dtype=torch.float64, requires_grad=True)
    for number in range(passes):
        out = case.plain(numbers(number, ROWS_OF_X, IN).double(), weight)
        out.backward(numbers(100 + number, *out.shape).double())
    assert weight.grad is not None
    return weight.grad


@KINDS
@EVERY
def test_the_sum_over_micro_batches_is_that_of_fp64_within_fp32_rounding(case, kind) -> None:
    model = OneWeight(case)
    weights = build(kind, model)
    for number in range(3):
        run_pass(model, number)
    weights.reduce()
    reference = in_fp64(case, 3)
    assert (gradients(weights)["weight"].double() - reference).abs().max() < 1e-6 * reference.abs().max()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "the test of the test"])
@EVERY
def test_no_16_bit_gradient_of_a_weights_size_is_made(case, fused) -> None:
    model = OneWeight(case)
    build("copies", model)
    if not fused:
        without_main_gradients(model)
    out = model(numbers(0, ROWS_OF_X, IN).requires_grad_())
    with New16Bits() as spy:
        out.backward(numbers(100, *out.shape))
    assert (model.weight.numel() in spy.sizes) is not fused


@EVERY
def test_recomputation_and_a_split_backward_pass_add_once(case) -> None:
    expected = in_fp64(case, 1)
    for way in ("whole", "recomputed", "split"):
        model = OneWeight(case)
        weights = build("copies", model)
        x = numbers(0, ROWS_OF_X, IN).requires_grad_()
        out = checkpoint(model, x, use_reentrant=False) if way == "recomputed" else model(x)
        dy = numbers(100, *out.shape)
        if way == "split":
            (dx,), second = backward_of_inputs([get_gradient_edge(out)], [dy], [x])
            assert dx is not None
            assert not gradients(weights)["weight"].any()
            second()
        else:
            out.backward(dy)
        found = gradients(weights)["weight"].double()
        assert (found - expected).abs().max() < 1e-6 * expected.abs().max(), way


@EVERY
def test_whoever_waits_for_a_weight_hears_of_it_once_a_pass(case) -> None:
    model = OneWeight(case)
    build("copies", model)
    heard: list[int] = []
    kept = call_after_gradient(model.weight, lambda: heard.append(1))
    for number in range(2):
        run_pass(model, number)
    assert kept is not None
    assert len(heard) == 2


@pytest.mark.parametrize("product", [loop_product, grouped_product])
def test_experts_of_a_rank_that_got_no_token_are_heard_of_too(product) -> None:
    model = OneWeight(of_experts(product, (0, 0, 0, 0)))
    weights = build("copies", model)
    heard: list[int] = []
    kept = call_after_gradient(model.weight, lambda: heard.append(1))
    model(numbers(0, 0, IN).requires_grad_()).backward(numbers(1, 0, OUT))
    assert kept is not None
    assert heard == [1]
    assert not gradients(weights)["weight"].any()


@EVERY
def test_a_frozen_weight_gets_nothing(case) -> None:
    model = OneWeight(case)
    build("copies", model)
    main = main_gradient_of(model.weight)
    model.weight.requires_grad_(False)
    run_pass(model, 0)
    assert not main.total.any()


# -- the loss without logits --------------------------------------------------------------------------

FACTOR = torch.linspace(0.5, 2.0, ROWS_OF_X)
SCALE = 3.0
CHUNK = 5


class Spy:
    """Row kernels that keep the gradients of logits, in 16 bits, which the products with hidden states are of."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.rows = RowKernels(ROWS.statistics, self.subtract_target_)

    def subtract_target_(self, logits: Tensor, *others: Tensor) -> None:
        ROWS.subtract_target_(logits, *others)
        self.made.append(logits.clone())

    def exact(self, hidden: Tensor) -> Tensor:
        return torch.cat(self.made).double().T @ hidden.double()


def sum_of_losses(form: str, hidden: Tensor, weight: Tensor, spy: Spy) -> Tensor:
    """Of ids without padding, times 3."""
    own = with_main_gradient(weight, lambda rows: rows[: len(IDS)])
    columns = torch.arange(ROWS_OF_X) * 3
    if form == "any gradient":
        return (chunked_losses(hidden, own, columns, SINGLE, spy.rows, CHUNK) * FACTOR * SCALE).sum()
    return chunked_weighted_sum(hidden, own, columns, FACTOR, SINGLE, spy.rows, CHUNK)[0] * SCALE


FORMS = pytest.mark.parametrize("form", ["any gradient", "a weighted sum"])


@FORMS
@KINDS
def test_losses_without_logits_add_their_chunks_in_fp32(kind, form) -> None:
    model = OneWeight(CASES["padded rows"])
    weights = build(kind, model)
    expected = torch.zeros(PADDED, IN, dtype=torch.float64)
    for number in range(2):
        hidden, spy = numbers(number, ROWS_OF_X, IN), Spy()
        sum_of_losses(form, hidden.clone().requires_grad_(), model.weight, spy).backward()
        assert len(spy.made) == 3
        expected[: len(IDS)] += spy.exact(hidden) * (1.0 if form == "any gradient" else SCALE)
    weights.reduce()
    found = gradients(weights)["weight"].double()
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()
    assert not found[len(IDS) :].any()


@FORMS
def test_their_gradients_are_those_of_whole_logits(form) -> None:
    model = OneWeight(CASES["padded rows"])
    weights = build("copies", model)
    hidden = numbers(0, ROWS_OF_X, IN).requires_grad_()
    sum_of_losses(form, hidden, model.weight, Spy()).backward()
    wide, matrix = hidden.detach().double().requires_grad_(), model.weight.detach().double().requires_grad_()
    logits = wide @ matrix[: len(IDS)].T
    (F.cross_entropy(logits, torch.arange(ROWS_OF_X) * 3, reduction="none") * FACTOR * SCALE).sum().backward()
    for mine, reference in ((hidden.grad, wide.grad), (gradients(weights)["weight"], matrix.grad)):
        assert (mine.double() - reference).norm() < 0.01 * reference.norm()


def test_a_split_backward_pass_computes_each_gradient_of_a_loss_in_its_own_part() -> None:
    model = OneWeight(CASES["padded rows"])
    weights = build("copies", model)
    hidden, spy = numbers(0, ROWS_OF_X, IN).requires_grad_(), Spy()
    loss = sum_of_losses("any gradient", hidden, model.weight, spy)
    (dx,), second = backward_of_inputs([get_gradient_edge(loss)], [torch.ones(())], [hidden])
    assert dx is not None
    assert not gradients(weights)["weight"].any()
    spy.made.clear()
    second()
    expected = spy.exact(hidden.detach())
    found = gradients(weights)["weight"][: len(IDS)].double()
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


@FORMS
def test_a_loss_leaves_a_frozen_output_matrix_alone(form) -> None:
    model = OneWeight(CASES["padded rows"])
    build("copies", model)
    main = main_gradient_of(model.weight)
    model.weight.requires_grad_(False)
    sum_of_losses(form, numbers(0, ROWS_OF_X, IN).requires_grad_(), model.weight, Spy()).backward()
    assert not main.total.any()
