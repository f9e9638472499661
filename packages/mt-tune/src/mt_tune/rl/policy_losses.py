"""Losses of tokens by the ratio of the policy to the one that drew them, as pure functions (rl.loss).

Each takes fp32 tensors of one shape and returns the loss of each token; train.loss_normalization takes the mean. The
gradient goes through `logps` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

SequenceMean = Callable[[Tensor], Tensor]
"""[B, S] -> [B, S]: at each position the mean over the drawn tokens of its completion."""
LARGEST_LOG_RATIO = 20.0
"""Log-ratios are limited to it, as in verl, so that no ratio is infinite."""


@dataclass(frozen=True)
class PolicyOptions:
    """low, high: bounds of the ratio are 1 - low and 1 + high (of cispo: high itself). delta: of dual clip."""

    low: float = 0.2
    high: float = 0.2
    delta: float | None = None


@dataclass(frozen=True)
class Tokens:
    """logps: by the policy that is trained. old_logps: before the updates on these tokens. advantages. Each [B, S]."""

    logps: Tensor
    old_logps: Tensor
    advantages: Tensor
    sequence_mean: SequenceMean

    @property
    def ratio(self) -> Tensor:
        return (self.logps - self.old_logps).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()

    @property
    def sequence_ratio(self) -> Tensor:
        """exp of the mean log-ratio of the completion (GSPO)."""
        means = self.sequence_mean(self.logps - self.old_logps)
        return means.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _clipped(ratio: Tensor, advantages: Tensor, options: PolicyOptions) -> Tensor:
    bounded = ratio.clamp(1 - options.low, 1 + options.high)
    limited = ratio if options.delta is None else ratio.clamp(max=options.delta)
    return -torch.minimum(limited * advantages, bounded * advantages)


def clip(tokens: Tokens, options: PolicyOptions) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO (Schulman et al., 2017), GRPO, DAPO. With delta, r is at most that
    (dual clip, Ye et al., 2020)."""
    return _clipped(tokens.ratio, tokens.advantages, options)


def gspo(tokens: Tokens, options: PolicyOptions) -> Tensor:
    """The same with the ratio of the completion, the geometric mean of its tokens' (Zheng et al., 2025)."""
    return _clipped(tokens.sequence_ratio, tokens.advantages, options)


def cispo(tokens: Tokens, options: PolicyOptions) -> Tensor:
    """-A log p, weighted by the ratio up to `high`, which has no gradient (MiniMax-M1, 2025)."""
    return -tokens.ratio.clamp(max=options.high).detach() * tokens.advantages * tokens.logps


def sapo(tokens: Tokens, options: PolicyOptions) -> Tensor:
    """-A 4/t sigmoid(t (r - 1)), t 1 where A is above 0, else 1.05 (Gao et al., 2025)."""
    ratio = tokens.ratio
    t = torch.where(tokens.advantages > 0, torch.ones_like(ratio), 1.05)
    return -tokens.advantages * torch.sigmoid(t * (ratio - 1)) * 4 / t


def reinforce(tokens: Tokens, options: PolicyOptions) -> Tensor:
    """-A log p (Williams, 1992)"""
    return -tokens.advantages * tokens.logps


POLICY_LOSSES: Mapping[str, Callable[[Tokens, PolicyOptions], Tensor]] = MappingProxyType(
    {"clip": clip, "gspo": gspo, "cispo": cispo, "sapo": sapo, "reinforce": reinforce}
)
"""By the name that rl.loss has."""


# -- divergence from a reference, in the loss --------------------------------------------------------


def k2(logps: Tensor, references: Tensor, ratio: Tensor) -> Tensor:
    """Half the squared log-ratio, weighted by the importance ratio without its gradient."""
    return ratio.detach() * (logps - references) ** 2 / 2


def k3(logps: Tensor, references: Tensor, ratio: Tensor) -> Tensor:
    """q/p - log(q/p) - 1 (Schulman, 2020) times the importance ratio with its gradient: that of the divergence."""
    return ratio * k3_value(logps, references)


def k3_value(logps: Tensor, references: Tensor) -> Tensor:
    difference = (references - logps).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return difference.exp() - difference - 1


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = MappingProxyType({"k2": k2, "k3": k3})


# -- weights for the difference between generation and training --------------------------------------


def sampling_weights(
    kind: str, differences: Tensor, sequence_sum: SequenceMean, sequence_mean: SequenceMean, low: float, high: float
) -> Tensor:
    """differences [B, S]: log p trained - log p drawn, 0 where nothing was drawn -> weights [B, S], without a gradient.

    See rl.sampling_correction. "none": 1 everywhere.
    """
    if kind == "none":
        return torch.ones_like(differences)
    level, _, limit = kind.partition("_")
    of_level = {"token": lambda x: x, "sequence": sequence_sum, "geometric": sequence_mean}[level]
    weights = of_level(differences).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    if limit == "truncate":
        return weights.clamp(max=high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)
