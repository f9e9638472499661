"""Logits to scores, weights and distributions over experts. Shapes: T tokens, E experts, k chosen ones.

Everything goes through logarithms of scores, so that no epsilon is needed where scores vanish: an epsilon would
let a router escape its balance loss by making all its scores small.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_moe.config import ScoreFunction

_SOFTPLUS_IS_EXP = -20.0
"""Below this softplus(x) is exp(x) to the last bit that fp32 has."""


def log_scores(logits: Tensor, function: ScoreFunction) -> Tensor:
    """[T, E] -> logarithms of the scores."""
    if function == "softmax":
        return F.log_softmax(logits, -1)
    if function == "sigmoid":
        return F.logsigmoid(logits)
    small = logits < _SOFTPLUS_IS_EXP
    log_softplus = F.softplus(logits.masked_fill(small, 0.0)).log()
    return 0.5 * torch.where(small, logits, log_softplus)


def distribution(logits: Tensor, function: ScoreFunction) -> Tensor:
    """[T, E]: each token's scores divided by their sum, as balance losses read them."""
    return log_scores(logits, function).softmax(-1)


def expert_weights(logits: Tensor, experts: Tensor, function: ScoreFunction, pre_softmax: bool) -> Tensor:
    """Weights [T, k] of the chosen experts [T, k].

    Softmax: before the choice over all experts (pre_softmax), else over the chosen ones. The other scores are
    divided by their sum over the chosen ones, where there is more than one.
    """
    if function == "softmax" and not pre_softmax:
        return logits.gather(1, experts).softmax(-1)
    chosen = log_scores(logits, function).gather(1, experts)
    if function == "softmax" or experts.shape[1] == 1:
        return chosen.exp()
    return chosen.softmax(-1)
