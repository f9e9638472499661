"""Advantages of completions over others of the same prompt and batch, as pure functions (rl.advantage).

Rewards are [P, G] of P prompts with G completions each, fp64; NaN for a completion that no reward function judged,
which is left out of means and deviations and has advantage 0. Deviations are Bessel-corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
GROUP_EPSILON = 1e-4
"""Added to deviations, as in TRL."""
WHITENING_EPSILON = 1e-8
"""Added to the variance over tokens, as in verl."""


@dataclass(frozen=True)
class Scored:
    """rewards [P, G]. lengths [P, G]: tokens that the policy drew. penalties: of each completion, in the order of
    rewards, what is subtracted at each of its tokens ([length] each; beta times the log-ratio to the reference)."""

    rewards: Values
    lengths: Values
    penalties: Sequence[Values]

    @property
    def penalized(self) -> Values:
        """[P, G] rewards minus the penalties of all tokens of the completion."""
        sums = np.array([part.sum() for part in self.penalties]).reshape(self.rewards.shape)
        return self.rewards - sums

    def per_token(self, of_completions: Values) -> list[Values]:
        """[P, G] -> the same value at each token; NaN becomes 0."""
        values = np.nan_to_num(of_completions, nan=0.0).ravel()
        return [np.full(len(part), value) for part, value in zip(self.penalties, values, strict=True)]


def group_means(rewards: Values) -> Values:
    """[P, G] -> [P, 1]; NaN for a group without a reward."""
    counts = (~np.isnan(rewards)).sum(1, keepdims=True)
    return np.where(counts > 0, np.nansum(rewards, 1, keepdims=True) / np.maximum(counts, 1), np.nan)


def deviation(values: Values, axis: int | None = None) -> Values:
    """Bessel-corrected, over what is no NaN; 0 of fewer than two values."""
    known = ~np.isnan(values)
    counts = known.sum(axis=axis, keepdims=True)
    means = np.where(known, values, 0.0).sum(axis=axis, keepdims=True) / np.maximum(counts, 1)
    squares = (np.where(known, values - means, 0.0) ** 2).sum(axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(counts - 1, 1))


def grpo(batch: Scored) -> list[Values]:
    """(R - mean of the group) / (deviation of the group + 1e-4)"""
    rewards = batch.penalized
    return batch.per_token((rewards - group_means(rewards)) / (deviation(rewards, 1) + GROUP_EPSILON))


def dr_grpo(batch: Scored) -> list[Values]:
    """R - mean of the group"""
    rewards = batch.penalized
    return batch.per_token(rewards - group_means(rewards))


def grpo_batch(batch: Scored) -> list[Values]:
    """(R - mean of the group) / (deviation of all rewards + 1e-4)"""
    rewards = batch.penalized
    return batch.per_token((rewards - group_means(rewards)) / (deviation(rewards) + GROUP_EPSILON))


def rloo(batch: Scored) -> list[Values]:
    """R - mean of the other completions of the group; 0 for a completion without others."""
    rewards = batch.penalized
    counts = (~np.isnan(rewards)).sum(1, keepdims=True)
    others = (np.nansum(rewards, 1, keepdims=True) - rewards) / np.maximum(counts - 1, 1)
    return batch.per_token(np.where(counts > 1, rewards - others, 0.0))


def opo(batch: Scored) -> list[Values]:
    """R - mean of the group weighted by lengths"""
    rewards = batch.penalized
    lengths = np.where(np.isnan(rewards), 0.0, batch.lengths)
    totals = np.maximum(lengths.sum(1, keepdims=True), 1.0)
    return batch.per_token(rewards - np.nansum(lengths * rewards, 1, keepdims=True) / totals)


def reinforce_plus_plus(batch: Scored) -> list[Values]:
    """Return of each token (the reward, minus the penalties from it on), whitened over all tokens of the batch."""
    judged = ~np.isnan(batch.rewards.ravel())
    returns = [
        reward - part[::-1].cumsum()[::-1]
        for reward, part in zip(np.nan_to_num(batch.rewards.ravel()), batch.penalties, strict=True)
    ]
    return whitened(returns, judged.tolist())


def reinforce_plus_plus_baseline(batch: Scored) -> list[Values]:
    """R - mean of the group, whitened over all tokens of the batch"""
    centered = batch.penalized - group_means(batch.penalized)
    return whitened(batch.per_token(centered), (~np.isnan(centered)).ravel().tolist())


def whitened(values: Sequence[Values], counted: Sequence[bool]) -> list[Values]:
    """Values with mean 0 and deviation 1 over all tokens of counted completions. Others become 0."""
    kept = [part for part, counts in zip(values, counted, strict=True) if counts and len(part)]
    tokens = np.concatenate(kept) if kept else np.zeros(0)
    if len(tokens) < 2:
        return [np.zeros_like(part) for part in values]
    scale = 1.0 / np.sqrt(tokens.var(ddof=1) + WHITENING_EPSILON)
    return [
        (part - tokens.mean()) * scale if counts else np.zeros_like(part)
        for part, counts in zip(values, counted, strict=True)
    ]


ADVANTAGE_FUNCTIONS: Mapping[str, Callable[[Scored], list[Values]]] = MappingProxyType(
    {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "grpo_batch": grpo_batch,
        "rloo": rloo,
        "opo": opo,
        "reinforce_plus_plus": reinforce_plus_plus,
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    }
)
"""By the name that rl.advantage has."""


def has_equal_rewards(rewards: Values) -> NDArray[np.bool_]:
    """[P, G] -> [P]: groups from which nothing is learned. Single completions are compared over the batch."""
    if rewards.shape[1] == 1:
        return np.broadcast_to(deviation(rewards)[0] <= 1e-12, len(rewards))
    return deviation(rewards, 1)[:, 0] <= 1e-12


def overlong_penalty(length: int, longest: int, buffer: int, penalty: float) -> float:
    """Soft punishment of DAPO: 0 up to longest - buffer tokens, from there on falling to -penalty at the longest."""
    over = length - (longest - buffer)
    return 0.0 if buffer == 0 or over <= 0 else -penalty * min(over / buffer, 1.0)
