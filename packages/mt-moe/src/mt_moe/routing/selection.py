"""Scores, the experts chosen by them, their weights, and capacity. The choice has no gradient; the weights have one.
Shapes: T tokens, E experts, k chosen experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_moe.config import MoeConfig, ScoreFunction
from mt_moe.permutation import count_occurrences

# -- logits to scores, weights and distributions over experts ----------------------------------------
#
# Everything is computed from log-scores, which stay finite where scores underflow. Distributions are normalized
# without an epsilon: with one, a router could lower its balance loss by making all its scores small.

_SOFTPLUS_IS_EXP = -20.0
"""Below this softplus(x) equals exp(x) in fp32."""

EPSILON_OF_WEIGHTS = 1e-20
"""What DeepSeek-V3 and Megatron-Core add to the sum that normalizes the weights of the chosen experts."""
SMALLEST_SUM = 1e-12
"""The least by which probabilities of the chosen experts are divided where a bias has a part in the choice, as in
ERNIE 4.5: the chosen ones may be the least probable of all."""


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


def expert_weights(
    logits: Tensor,
    experts: Tensor,
    function: ScoreFunction,
    pre_softmax: bool,
    *,
    biased: bool = False,
    epsilon: float = EPSILON_OF_WEIGHTS,
) -> Tensor:
    """Weights [T, k] of the chosen experts [T, k].

    Softmax: before top-k over all experts (pre_softmax), else over the chosen ones. The other scores are
    normalized over the chosen experts with an epsilon, if k > 1. biased: the choice was not by scores alone.
    """
    if function == "softmax" and not pre_softmax and not biased:
        return logits.gather(1, experts).softmax(-1)
    chosen = log_scores(logits, function).gather(1, experts)
    if (function == "softmax" and pre_softmax) or experts.shape[1] == 1:
        return chosen.exp()
    log_sum = chosen.logsumexp(-1, keepdim=True)
    if function == "softmax":
        return (chosen - log_sum.clamp(min=math.log(SMALLEST_SUM))).exp()
    # score / (sum of chosen scores + epsilon), in logarithms.
    return (chosen - log_sum.logaddexp(torch.full_like(log_sum, math.log(epsilon)))).exp()


def weights_beside_shared(logits: Tensor, experts: Tensor, shared: Tensor) -> Tensor:
    """Weights [T, k + n] of the chosen experts [T, k] and of n shared ones with the logits `shared` [T, n]: their
    sigmoid scores, normalized over all of them (Inkling)."""
    chosen = F.logsigmoid(torch.cat([logits.gather(1, experts), shared], 1))
    return (chosen - chosen.logsumexp(-1, keepdim=True)).exp()


TABLE_OFFSET = 256
"""What is taken from the numbers of experts in a table of them by token, which is of floats: with it bf16, to which
FSDP2 casts all parameters, has those of 513 experts exactly."""


def dealt_experts(table: Tensor, generator: torch.Generator, experts: int) -> Tensor:
    """Fills the table [vocab, k]: of consecutive ids each has the next k experts, in a random order of all."""
    vocab, topk = table.shape
    order = torch.randperm(experts, generator=generator, device=table.device)
    # Consecutive places modulo E: the experts of a token differ, and all have as many tokens of the vocabulary.
    places = torch.arange(vocab * topk, device=table.device) % experts
    return table.copy_(order[places].view(vocab, topk) - TABLE_OFFSET)


def experts_of_tokens(table: Tensor, ids: Tensor) -> Tensor:
    """table [vocab, k], ids [T] -> experts [T, k] int64"""
    return F.embedding(ids, table).long() + TABLE_OFFSET


Choice = Callable[[Tensor], Tensor]
"""logits [T, E] -> experts [T, k] int64, the highest score first"""


def choose_experts(logits: Tensor, config: MoeConfig, bias: Tensor | None) -> Tensor:
    """The k experts with the highest scores plus bias, among those of the token's groups."""
    scores = ranked_scores(logits.detach(), config)
    if bias is not None:
        scores = scores + bias
    if config.moe_router_num_groups is not None:
        scores = keep_best_groups(scores, config)
    return scores.topk(config.moe_router_topk).indices


def ranked_scores(logits: Tensor, config: MoeConfig) -> Tensor:
    """[T, E]: the scores that rank experts and groups, as in Megatron-Core's `topk_routing_with_score_function`.

    With the softmax after top-k these are the logits. Experts rank the same by logits and probabilities, but groups do
    not: a sum of logits and a sum of probabilities order them differently. A bias is added to probabilities.
    """
    biased = config.moe_router_enable_expert_bias
    if config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax and not biased:
        return logits
    return log_scores(logits, config.moe_router_score_function).exp()


def keep_best_groups(scores: Tensor, config: MoeConfig) -> Tensor:
    """Scores [T, E] with -inf outside each token's groups: the groups with the largest sum of their highest scores
    (DeepSeek-V2, 2024, with one score per group; DeepSeek-V3, 2024, with two)."""
    assert config.moe_router_num_groups is not None
    assert config.moe_router_group_topk is not None
    # [T, groups, E / groups]
    grouped = scores.unflatten(1, (config.moe_router_num_groups, -1))
    # [T, groups]
    group_scores = grouped.topk(config.group_score_topk).values.sum(-1)
    chosen = group_scores.topk(config.moe_router_group_topk).indices
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(dropped[:, :, None], -torch.inf).flatten(1)


def deal_in_turn(logits: Tensor, topk: int) -> Tensor:
    """Round robin: the numbers of tokens of any two experts differ by at most one."""
    tokens, experts = logits.shape
    # Consecutive numbers modulo E: a token's k experts differ, as k <= E.
    return (torch.arange(tokens * topk, device=logits.device) % experts).view(tokens, topk)


def draw_at_random(logits: Tensor, topk: int, seed: int) -> Tensor:
    """k different random experts for each token, the same at every call."""
    generator = torch.Generator(device=logits.device).manual_seed(seed)
    # The k largest of E random numbers are k different experts.
    return torch.rand(logits.shape, device=logits.device, generator=generator).topk(topk).indices


# -- Sinkhorn's iteration, as in Megatron's `sinkhorn` router (Clark et al., S-BASE, 2022) -----------

TOLERANCE = 1e-4
EPSILON = 1e-8
MOST_ITERATIONS = 1000


def sinkhorn(logits: Tensor, total_tokens: int, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """exp(logits) with rows and columns scaled until each expert has the same share of the tokens.

    logits [T, E] of this rank's tokens; total_tokens: over all ranks that share the micro-batch, over which
    `sum_over_ranks` sums a tensor [E]. So the result does not depend on how the tokens are sharded.
    Stops when the columns' factors change by less than 1e-4 in the mean.
    """
    rows = (logits - logits.amax(-1, keepdim=True)).exp()  # a factor for each row changes nothing
    experts = logits.shape[1]
    column = torch.ones(experts, dtype=logits.dtype, device=logits.device)
    row = column.new_ones(len(logits))
    for _ in range(MOST_ITERATIONS):
        # [T]: each token gets the share 1 / total_tokens
        row = 1.0 / (total_tokens * (rows @ column + EPSILON))
        # [E]: each expert gets the share 1 / E
        scaled = 1.0 / (experts * (sum_over_ranks(row @ rows) + EPSILON))
        change = (scaled - column).abs().mean()
        column = scaled
        # The sum over ranks is the same number on all of them, so all leave the loop in the same iteration.
        if change <= TOLERANCE:
            break
    return rows * column * row[:, None]


def sinkhorn_weights(logits: Tensor, experts: Tensor) -> Tensor:
    """Weights [T, k]: the sigmoid for one expert a token, else the softmax over all experts."""
    scores = logits.sigmoid() if experts.shape[1] == 1 else logits.softmax(-1)
    return scores.gather(1, experts)


# -- token dropping ----------------------------------------------------------------------------------


def expert_capacity(tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Tokens that an expert accepts from a rank: factor times the mean, rounded up (Megatron's rule)."""
    return math.ceil(tokens * topk / num_experts * factor)


def keep_within(
    experts: Tensor, weights: Tensor, num_experts: int, capacity: int, policy: Literal["probs", "position"]
) -> Tensor:
    """[T, k] bool: for each expert its first `capacity` tokens are kept, or those with the highest weights.

    Ties keep the earlier token.
    """
    # [T * k]
    chosen = experts.flatten()
    priority = _by_weight(weights) if policy == "probs" else torch.arange(chosen.numel(), device=chosen.device)
    # argsort is stable, so within an expert the choices keep the order of `priority`.
    order = priority[chosen[priority].argsort(stable=True)]  # by expert, within one by priority
    counts = count_occurrences(chosen, num_experts)
    first = counts.cumsum(0) - counts
    # Rank of each choice among those of its expert, in sorted order.
    place = torch.arange(chosen.numel(), device=chosen.device) - first[chosen[order]]
    kept = torch.empty_like(chosen, dtype=torch.bool)
    # Back to the order of tokens.
    kept[order] = place < capacity
    return kept.view_as(experts)


def _by_weight(weights: Tensor) -> Tensor:
    return weights.detach().flatten().argsort(descending=True, stable=True)
