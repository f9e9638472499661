"""Which experts a token gets. Nothing here has a gradient. Shapes: T tokens, E experts, k chosen ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mt_moe.config import MoeConfig
from mt_moe.routing.scores import log_scores

Choice = Callable[[Tensor], Tensor]
"""logits [T, E] -> experts [T, k] int64, the first one with the highest score"""


def choose_experts(logits: Tensor, config: MoeConfig, bias: Tensor | None) -> Tensor:
    """The k experts with the highest scores plus bias, among those of the token's groups."""
    scores = logits.detach()
    if config.moe_router_score_function != "softmax" or config.moe_router_num_groups is not None:
        scores = log_scores(scores, config.moe_router_score_function).exp()
    if bias is not None:
        scores = scores + bias
    if config.moe_router_num_groups is not None:
        scores = keep_best_groups(scores, config)
    return scores.topk(config.moe_router_topk).indices


def keep_best_groups(scores: Tensor, config: MoeConfig) -> Tensor:
    """Scores [T, E] with -inf outside each token's groups: those whose highest scores have the largest sum
    (DeepSeek-V2, 2024, with one score a group; DeepSeek-V3, 2024, with two)."""
    assert config.moe_router_num_groups is not None
    assert config.moe_router_group_topk is not None
    grouped = scores.unflatten(1, (config.moe_router_num_groups, -1))
    group_scores = grouped.topk(config.group_score_topk).values.sum(-1)
    chosen = group_scores.topk(config.moe_router_group_topk).indices
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(dropped[:, :, None], -torch.inf).flatten(1)


def deal_in_turn(logits: Tensor, topk: int) -> Tensor:
    """Every expert gets the same number of tokens, up to one."""
    tokens, experts = logits.shape
    return (torch.arange(tokens * topk, device=logits.device) % experts).view(tokens, topk)


def draw_at_random(logits: Tensor, topk: int, seed: int) -> Tensor:
    """k different experts for each token, the same at every call."""
    generator = torch.Generator(device=logits.device).manual_seed(seed)
    return torch.rand(logits.shape, device=logits.device, generator=generator).topk(topk).indices
