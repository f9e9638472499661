"""Logits to scores, weights and distributions over experts. Shapes: T tokens, E experts, k chosen ones.

Everything is computed from log-scores, which stay finite where scores underflow. Distributions are normalized
without an epsilon: with one, a router could lower its balance loss by making all its scores small.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_moe.config import ScoreFunction

_SOFTPLUS_IS_EXP = -20.0
"""Below this softplus(x) equals exp(x) in fp32."""

LOG_EPSILON = math.log(1e-20)
"""Epsilon that DeepSeek-V3 and Megatron-Core add to the sum that normalizes the weights of the chosen experts."""


def log_scores(logits: Tensor, function: ScoreFunction) -> Tensor:
    """[T, E] -> log-scores."""
    if function == "softmax":
        return F.log_softmax(logits, -1)
    if function == "sigmoid":
        return F.logsigmoid(logits)
    # softplus underflows to 0 for very small logits, and its log would be -inf. The mask also keeps the gradient of the
    # branch that torch.where does not take from being 0 * inf = NaN.
    small = logits < _SOFTPLUS_IS_EXP
    log_softplus = F.softplus(logits.masked_fill(small, 0.0)).log()
    # log sqrt(softplus(x)); log softplus(x) = x where softplus is exp.
    return 0.5 * torch.where(small, logits, log_softplus)


def distribution(logits: Tensor, function: ScoreFunction) -> Tensor:
    """[T, E]: each token's scores normalized to sum 1, for the balance losses."""
    return log_scores(logits, function).softmax(-1)


def expert_weights(logits: Tensor, experts: Tensor, function: ScoreFunction, pre_softmax: bool) -> Tensor:
    """Weights [T, k] of the chosen experts [T, k].

    Softmax: before top-k over all experts (pre_softmax), else over the chosen ones. The other scores are
    normalized over the chosen experts with epsilon 1e-20, if k > 1.
    """
    if function == "softmax" and not pre_softmax:
        return logits.gather(1, experts).softmax(-1)
    chosen = log_scores(logits, function).gather(1, experts)
    if function == "softmax" or experts.shape[1] == 1:
        return chosen.exp()
    # score / (sum of chosen scores + epsilon), in logarithms.
    log_sum = chosen.logsumexp(-1, keepdim=True)
    return (chosen - log_sum.logaddexp(torch.full_like(log_sum, LOG_EPSILON))).exp()
