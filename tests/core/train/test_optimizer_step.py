"""A step of the framework against the same step written in plain torch."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mt_core.data.loss_weights import LossCounts
from mt_core.nn.auxiliary import AuxiliaryLoss
from mt_core.nn.loss import cross_entropy, weighted_sum
from mt_core.optim.finalize_grads import GradFinalizer, TiedWeights
from mt_core.optim.loss_scale import LossScaler
from mt_core.optim.master_weights import Fp32MasterWeights, build_master_weights
from mt_core.optim.param_groups import param_groups
from mt_core.parallel.context import ParallelContext
from mt_core.train.step.forward_backward import NoPipelining, default_forward_step
from mt_core.train.step.optimizer_step import (
    OptimizerStep,
    StepOutcome,
    clip_factor,
    device_clip_factor,
)

VOCAB, HIDDEN = 11, 8


class Bigram(nn.Module):
    """Logits from the current token through a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(tokens)))


def batches(count: int = 3, masked: float = 0.3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (count, 2, 9), generator=generator)
    mask = (torch.rand(count, 2, 8, generator=generator) > masked).float()
    return [{"tokens": x[:, :-1], "labels": x[:, 1:], "loss_mask": m} for x, m in zip(ids, mask, strict=True)]


def counts_of(data) -> LossCounts:
    counted = float(sum(batch["loss_mask"].sum() for batch in data))
    return LossCounts(counted, counted)


@dataclass
class Step:
    """An optimizer step whose metrics are read at once."""

    step: OptimizerStep

    def __call__(self, data, learning_rate: float) -> StepOutcome:
        return self.step(data, learning_rate, counts_of(data)).result()

    @property
    def scaler(self) -> LossScaler:
        return self.step.scaler


def build(model: nn.Module, *, scale: float = 1.0, dynamic: bool = False, clip: float = 0.0, lr: float = 0.1):
    weights = build_master_weights(model)
    optimizer = torch.optim.SGD(param_groups(weights.named_parameters(), 0.0), lr=lr)
    scaler = LossScaler(scale=scale, dynamic=dynamic, hysteresis=1, patience=1)
    passes = NoPipelining(model, default_forward_step(cross_entropy))
    return Step(OptimizerStep(model, weights, optimizer, passes, scaler, clip)), weights


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = Bigram()
    model.inputs = ("tokens",)
    return model


def plain_loss(model: nn.Module, data) -> torch.Tensor:
    """Sum of the losses of unmasked tokens of all micro-batches over their count."""
    total = sum(
        (
            F.cross_entropy(model(b["tokens"]).flatten(0, 1), b["labels"].flatten(), reduction="none")
            * b["loss_mask"].flatten()
        ).sum()
        for b in data
    )
    return total / sum(b["loss_mask"].sum() for b in data)


def test_it_is_one_step_on_the_mean_over_all_unmasked_tokens(model) -> None:
    plain = copy.deepcopy(model)
    data = batches()
    loss = plain_loss(plain, data)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    outcome = build(model)[0](data, learning_rate=0.1)
    assert outcome.loss == pytest.approx(loss.item(), rel=1e-6)
    assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert outcome.tokens == sum(b["loss_mask"].sum() for b in data)
    for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-7, rtol=1e-6)


def test_six_steps_are_those_of_plain_torch(model) -> None:
    """Each begins with gradients of 0, and counts its own tokens."""
    plain = copy.deepcopy(model)
    optimizer, step = torch.optim.SGD(plain.parameters(), lr=0.1), build(model)[0]
    for number in range(6):
        data = batches(count=1 + number % 3, masked=0.1 * number)
        loss = plain_loss(plain, data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step(data, learning_rate=0.1).loss == pytest.approx(loss.item(), rel=1e-5)
    for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-6, rtol=1e-5)


def test_cutting_a_batch_into_micro_batches_changes_nothing(model) -> None:
    other = copy.deepcopy(model)
    whole = {key: torch.cat([b[key] for b in batches()]) for key in ("tokens", "labels", "loss_mask")}
    one, many = build(model)[0]([whole], 0.1), build(other)[0](batches(), 0.1)
    assert one.loss == pytest.approx(many.loss, rel=1e-6)
    assert one.grad_norm == pytest.approx(many.grad_norm, rel=1e-5)


def test_the_learning_rate_of_the_step_is_used(model) -> None:
    before = [p.clone() for p in model.parameters()]
    build(model, lr=123.0)[0](batches(), learning_rate=0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_masked_position_adds_nothing_even_when_its_loss_is_infinite() -> None:
    losses = torch.tensor([1.0, math.inf, math.nan], requires_grad=True)
    total = weighted_sum(losses, torch.tensor([1.0, 0.0, 0.0]))
    total.backward()
    assert total == 1.0
    assert losses.grad.tolist() == [1.0, 0.0, 0.0]


def test_a_batch_with_every_position_masked_leaves_the_weights_alone(model) -> None:
    before = [p.clone() for p in model.parameters()]
    outcome = build(model)[0](batches(masked=2.0), 0.1)
    assert outcome.loss == 0.0
    assert outcome.grad_norm == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_norm_of_a_large_gradient_is_that_of_fp64() -> None:
    """On a CPU torch's own is off by 4e-4 here."""
    weight = nn.Parameter(torch.empty(10_000_000))
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    finalizer = GradFinalizer({}, ParallelContext(), TiedWeights(), sharded=False)
    assert float(finalizer.norm([("weight", weight)])) == pytest.approx(float(weight.grad.double().norm()), rel=1e-6)


def test_clipping_is_to_the_global_norm(model) -> None:
    plain = copy.deepcopy(model)
    plain_loss(plain, batches()).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    outcome = build(model, clip=0.05)[0](batches(), 0.1)
    assert outcome.grad_norm > 0.05, "it is reported as it was before clipping"
    for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("norm", "limit", "factor"), [(0.5, 1.0, 1.0), (2.0, 1.0, 0.5), (2.0, 0.0, 1.0)])
def test_clip_factor(norm, limit, factor) -> None:
    assert clip_factor(norm, limit) == pytest.approx(factor, rel=1e-5)
    on_device = torch.tensor([1.0, norm], dtype=torch.float64)
    assert device_clip_factor(*on_device, limit).item() == clip_factor(norm, limit)


@pytest.mark.parametrize(("loss", "norm"), [(math.inf, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_clip_factor_of_a_step_to_skip_is_nan(loss, norm) -> None:
    assert device_clip_factor(torch.tensor(loss), torch.tensor(norm), 1.0).isnan()


def test_weight_decay_leaves_vectors_and_biases_alone(model) -> None:
    decayed, free = param_groups(model.named_parameters(), 0.1)
    assert decayed["names"] == ["table.weight", "head.weight"]
    assert free["names"] == ["norm.weight", "norm.bias", "head.bias"]
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)


# -- 16 bit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_are_not_lost_in_16_bits(model, dtype) -> None:
    """Fifty steps of 1e-4: as far as in fp32, where weights of 16 bits alone would hardly move."""
    reference = copy.deepcopy(model)
    model.to(dtype)
    step, weights = build(model)
    assert isinstance(weights, Fp32MasterWeights)
    exact_step, _ = build(reference)
    start = weights.own["head.weight"].detach().clone()
    exact_start = reference.head.weight.detach().clone()
    for _ in range(50):
        step(batches(), 1e-4)
        exact_step(batches(), 1e-4)
    moved, expected = weights.own["head.weight"] - start, reference.head.weight - exact_start
    torch.testing.assert_close(moved, expected, rtol=0.05, atol=0.02 * expected.abs().max().item())
    assert torch.equal(model.head.weight, weights.own["head.weight"].to(dtype))


def test_gradients_of_bf16_accumulate_in_fp32(model) -> None:
    """256 micro-batches of one gradient g: in bf16 the sum would stall, in fp32 it is 256 g."""
    model.bfloat16()
    step, weights = build(model, lr=0.0)
    data = batches(1)
    one = dict.fromkeys(weights.own)
    step(data, 0.0)
    one = {name: copy_.grad.clone() for name, copy_ in weights.own.items()}
    step(data * 256, 0.0)  # each micro-batch has 1/256 of the tokens, so the mean is the same gradient
    for name, copy_ in weights.own.items():
        assert copy_.grad.dtype == torch.float32
        torch.testing.assert_close(copy_.grad, one[name], rtol=2e-2, atol=1e-4)


def test_the_loss_scale_cancels(model) -> None:
    other = copy.deepcopy(model)
    plain, scaled = build(model)[0](batches(), 0.1), build(other, scale=1024.0)[0](batches(), 0.1)
    assert scaled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    for mine, reference in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-7, rtol=1e-5)


class WithAuxiliaryLoss(Bigram):
    """Adds the mean square of the hidden layer."""

    inputs = ("tokens",)

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = AuxiliaryLoss("square")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        return self.head(self.norm(self.auxiliary(hidden, hidden.square().mean())))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_auxiliary_losses_have_the_loss_scale_too(scale) -> None:
    """The gradient is that of the loss and of the mean of the auxiliary losses, whatever the scale."""
    torch.manual_seed(0)
    model = WithAuxiliaryLoss()
    plain, data = copy.deepcopy(model).eval(), batches()
    auxiliary = sum(plain.table(batch["tokens"]).square().mean() for batch in data) / len(data)
    (plain_loss(plain, data) + auxiliary).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    outcome = build(model, scale=scale)[0](data, 0.1)
    assert outcome.auxiliary["square"] == pytest.approx(auxiliary.item(), rel=1e-6)
    for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-7, rtol=1e-5)


def test_a_step_after_which_the_scale_grows_is_divided_by_its_own_scale(model) -> None:
    other = copy.deepcopy(model)
    growing = build(other, scale=1024.0, dynamic=True)[0]
    growing.scaler.window = 1
    build(model)[0](batches(), 0.1)
    growing(batches(), 0.1)
    assert growing.scaler.scale == 2048.0
    for mine, reference in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-7, rtol=1e-5)


class EndedSteps(nn.Module):
    """Counts the ends of steps."""

    count = 0

    def after_step(self) -> None:
        self.count += 1


def test_an_overflow_skips_the_step_and_halves_the_scale(model) -> None:
    model.counter = EndedSteps()
    step, _ = build(model, scale=2.0**127, dynamic=True)
    while step(batches(), 0.0).updated:  # gradients below 1 leave room; a larger loss takes it
        step.scaler.scale *= 16.0
    before = [p.clone() for p in model.parameters()]
    scale, ended = step.scaler.scale, model.counter.count
    outcome = step(batches(), 0.1)
    assert not outcome.updated
    assert model.counter.count == ended + 1, "what layers counted in a skipped step is not of the next one"
    assert step.scaler.scale == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
