"""Losses of tokens and estimators of divergences: by hand, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mt_core.parallel.context import ParallelContext
from mt_tune.rl.drawn_logps import entropy
from mt_tune.rl.objective import sequence_mean, sequence_sum
from mt_tune.rl.policy_losses import KL_ESTIMATORS, POLICY_LOSSES, PolicyOptions, Tokens, sampling_weights

OLD, NEW, A = -2.0, -1.5, 0.7
RATIO = math.exp(NEW - OLD)


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loss(name: str, new: float, advantage: float, **options: float) -> tuple[float, float]:
    """Of one token, and its derivative by the log-probability."""
    logp = torch.tensor([[new]], dtype=torch.float64, requires_grad=True)
    tokens = Tokens(logp, torch.full_like(logp, OLD).detach(), torch.full_like(logp, advantage).detach(), lambda x: x)
    value = POLICY_LOSSES[name](tokens, PolicyOptions(**options)).sum()
    value.backward()
    assert logp.grad is not None
    return float(value.detach()), float(logp.grad)


CASES = [
    # The ratio 1.65 is above 1.2: clipped with a positive advantage, and without gradient.
    ("clip", NEW, A, {}, -1.2 * A, 0.0),
    ("clip", NEW, -A, {}, RATIO * A, RATIO * A),
    ("clip", NEW, A, {"high": 0.8}, -RATIO * A, -RATIO * A),
    ("clip", NEW, -A, {"delta": 1.5}, 1.5 * A, 0.0),
    ("clip", -2.5, -A, {"low": 0.3}, 0.7 * A, 0.0),
    ("gspo", NEW, A, {"high": 0.8}, -RATIO * A, -RATIO * A),
    ("cispo", NEW, A, {"high": 1.5}, -1.5 * A * NEW, -1.5 * A),
    ("cispo", NEW, -A, {"high": 5.0}, RATIO * A * NEW, RATIO * A),
    ("reinforce", NEW, A, {}, -A * NEW, -A),
    ("sapo", OLD, A, {}, -2 * A, -A),
    ("sapo", NEW, -A, {}, A * 4 / 1.05 * s(1.05 * (RATIO - 1)), None),
]


@pytest.mark.parametrize(("name", "new", "advantage", "options", "value", "slope"), CASES)
def test_a_token_by_hand(
    name: str, new: float, advantage: float, options: dict[str, float], value: float, slope: float | None
) -> None:
    found, found_slope = loss(name, new, advantage, **options)
    assert found == pytest.approx(value, rel=1e-12)
    if slope is not None:
        assert found_slope == pytest.approx(slope, rel=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_first_update_has_the_gradient_of_reinforce(name: str) -> None:
    for advantage in (A, -A):
        assert loss(name, OLD, advantage, high=5.0)[1] == pytest.approx(-advantage, rel=1e-12)


def test_a_completion_has_one_ratio_in_gspo() -> None:
    """Two tokens and padding: the mean log-ratio is that of both."""
    logps = torch.tensor([[-1.0, -2.0, -9.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.2, -2.6, 0.0]], dtype=torch.float64)
    drawn = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    tokens = Tokens(logps, old, torch.ones_like(old), sequence_mean(drawn, ParallelContext().cp))
    losses = POLICY_LOSSES["gspo"](tokens, PolicyOptions(high=1.0))
    assert losses[0, :2].tolist() == pytest.approx([-math.exp(0.4)] * 2)
    # The mean of both tokens' losses differentiates as the loss of the completion does: 1/2 by each log-probability.
    (losses * drawn).sum().div(2).backward()
    assert logps.grad is not None
    assert logps.grad[0].tolist() == pytest.approx([-math.exp(0.4) / 2] * 2 + [0.0])


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("same", [True, False])
def test_the_expected_gradient_is_that_of_the_divergence(name: str, same: bool) -> None:
    """Over all tokens of a small vocabulary, drawn by the policy itself, or by an older one with importance ratios."""
    torch.manual_seed(0)
    z, ref, other = (torch.randn(6, dtype=torch.float64) for _ in range(3))
    z.requires_grad_()
    logps, references = z.log_softmax(0), ref.log_softmax(0)
    (exact,) = torch.autograd.grad((logps.exp() * (logps - references)).sum(), z, retain_graph=True)
    old = logps.detach() if same else other.log_softmax(0)
    estimate = (old.exp() * KL_ESTIMATORS[name](logps, references, (logps - old).exp())).sum()
    (found,) = torch.autograd.grad(estimate, z)
    torch.testing.assert_close(found, exact)


DIFFERENCES = torch.tensor([[0.1, -0.3, 0.0], [1.0, 0.5, 0.0]])
DRAWN = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
E = math.exp
WEIGHTS = {
    "none": [1, 1, 1, 1],
    "token_truncate": [E(0.1), E(-0.3), 2, E(0.5)],
    "token_mask": [E(0.1), 0, 0, E(0.5)],
    "sequence_truncate": [E(-0.2), E(-0.2), 2, 2],
    "sequence_mask": [E(-0.2), E(-0.2), 0, 0],
    "geometric_mask": [E(-0.1), E(-0.1), 0, 0],
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_for_the_difference_to_generation(kind: str) -> None:
    """Bounds 0.8 and 2."""
    cp = ParallelContext().cp
    found = sampling_weights(kind, DIFFERENCES, sequence_sum(DRAWN, cp), sequence_mean(DRAWN, cp), 0.8, 2.0)
    assert found[:, :2].flatten().tolist() == pytest.approx(WEIGHTS[kind], rel=1e-6)


def test_entropy() -> None:
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -math.inf, -math.inf]]])
    found: Tensor = entropy(logits, ParallelContext().tp)
    expected = [math.log(4), -0.25 * math.log(0.25) - 0.75 * math.log(0.75)]
    assert found[0].tolist() == pytest.approx(expected, rel=1e-6)
