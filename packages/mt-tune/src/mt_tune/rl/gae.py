"""Advantages of tokens by a value model: generalized advantage estimation (Schulman et al., 2016; rl.advantage="gae").

Pure functions on fp64 arrays; a completion has [length] values, those of the tokens that the policy drew. Tokens that
tools added are left out, so that the next token of the policy follows the one before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mt_tune.rl.advantages import Values, whitened


@dataclass(frozen=True)
class Discounts:
    """gamma: of later rewards. lam: of later differences from the value model; 1 is the return, 0 one step."""

    gamma: float
    lam: float


def token_rewards(reward: float, penalties: Values) -> Values:
    """[length]: minus the penalty of each token; the last one has the reward of the completion, too."""
    rewards: Values = -np.asarray(penalties, np.float64)
    rewards[-1:] += reward
    return rewards


def gae(rewards: Values, values: Values, discounts: Discounts) -> Values:
    """A_t = d_t + gamma lam A_t+1 with d_t = r_t + gamma V_t+1 - V_t; nothing follows the last token."""
    following = np.append(values[1:], 0.0)
    differences = rewards + discounts.gamma * following - values
    advantages, later = np.zeros_like(differences), 0.0
    for t in reversed(range(len(differences))):
        later = differences[t] + discounts.gamma * discounts.lam * later
        advantages[t] = later
    return advantages


@dataclass(frozen=True)
class Estimates:
    """Estimates for each completion [length]: advantages, whitened over all tokens of the batch, and returns (what the
    value model learns: advantages before that, plus values)."""

    advantages: list[Values]
    returns: list[Values]


def estimated(
    rewards: Sequence[float], penalties: Sequence[Values], values: Sequence[Values], discounts: Discounts
) -> Estimates:
    """rewards: NaN of a completion that no function judged, whose advantages are 0 and whose returns are its values."""
    judged = [not np.isnan(reward) for reward in rewards]
    plain = [
        gae(token_rewards(reward, part), of_tokens, discounts) if known else np.zeros_like(of_tokens)
        for reward, part, of_tokens, known in zip(rewards, penalties, values, judged, strict=True)
    ]
    returns = [advantages + of_tokens for advantages, of_tokens in zip(plain, values, strict=True)]
    return Estimates(whitened(plain, judged), returns)
