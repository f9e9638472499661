"""Expert selection. Nothing here has a gradient. Shapes: T tokens, E experts, k chosen experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mt_moe.config import MoeConfig
from mt_moe.routing.scores import log_scores

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
    not: a sum of logits and a sum of probabilities order them differently.
    """
    if config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax:
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
