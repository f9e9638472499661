"""The router: from this rank's tokens to their experts and weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.errors import TrainingError
from mt_core.nn.dropout import SampleNoise
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, ones, zeros
from mt_core.parallel.context import ParallelContext
from mt_moe.config import MoeConfig
from mt_moe.permutation import Routing, count_occurrences
from mt_moe.routing.balance import BalanceLosses, Load, LoadCounter, Scored, on_backward
from mt_moe.routing.selection import (
    choose_experts,
    deal_in_turn,
    dealt_experts,
    distribution,
    draw_at_random,
    expert_capacity,
    expert_weights,
    experts_of_tokens,
    keep_within,
    sinkhorn,
    sinkhorn_weights,
    weights_beside_shared,
)
from mt_moe.tokens import TokenShare, own_tokens, partial_gradient_axes

# -- noise on the router's input (Fedus et al., Switch Transformers, 2022), the same in every layout -


class InputJitter(SampleNoise):
    """In training multiplies each element by a number drawn from [1 - epsilon, 1 + epsilon]."""

    def __init__(self, epsilon: float | None, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.epsilon = epsilon

    def forward(self, share: TokenShare) -> Tensor:
        """-> this rank's tokens [T, H] with noise. Every rank draws for whole sequences."""
        if self.epsilon is None or not self.training:
            return share.tokens
        self.seed()
        # [B, S, H] of whole sequences, of which each rank keeps the part of its own tokens: so the noise of a token
        # does not depend on the layout.
        shape = (share.num_sequences, share.total // share.num_sequences, share.tokens.shape[1])
        noise = share.tokens.new_empty(shape).uniform_(1.0 - self.epsilon, 1.0 + self.epsilon)
        return share.tokens * own_tokens(self.own_positions(noise).flatten(0, 1), self.ctx)


DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(LayoutModule):
    """logits = logit_scale (x W^T (+ b)), scores, the choice of k experts and their weights. E: with those that return
    the token.

    weight [E, H], bias [E] and expert_scale [E] are replicated. Every rank applies them to its own tokens, so their
    gradients are partial over tp. expert_bias [E] fp32 is updated by `after_step` only.

    scored_shared: so many shared experts have rows of `weight` behind the others, and weights from their scores, all of
    which a trained number, `global_scale` [1], multiplies.
    hashed_vocab: a token's experts are in token_experts [hashed_vocab, k], by its id (less `TABLE_OFFSET`), and there
    is no expert_bias.
    """

    weight: Tensor
    bias: Tensor | None
    expert_bias: Tensor | None
    expert_scale: Tensor | None
    global_scale: Tensor | None
    token_experts: Tensor | None
    faults: Tensor
    """[] fp32: 0, or NaN after the logits of some micro-batch were not finite."""

    def __init__(
        self,
        config: MoeConfig,
        hidden_size: int,
        layer: int,
        ctx: ParallelContext,
        *,
        init_std: float,
        bias: bool,
        hashed_vocab: int | None = None,
        logit_scale: float = 1.0,
        scored_shared: int = 0,
    ) -> None:
        super().__init__(ctx)
        self.logit_scale, self.scored_shared = logit_scale, scored_shared
        self.config, self.layer, self.is_hashed = config, layer, hashed_vocab is not None
        experts, partial = config.num_scored, partial_gradient_axes(ctx)
        dtype = torch.float32 if config.moe_router_weight_in_fp32 else None
        rows = experts + scored_shared
        layout = ParameterLayout((rows, hidden_size), normal(init_std), partial_gradient=partial, dtype=dtype)
        self.declare("weight", layout)
        self.declare("bias", ParameterLayout((rows,), zeros, partial_gradient=partial) if bias else None)
        of_all = ParameterLayout((1,), ones, partial_gradient=partial, dtype=torch.float32)
        self.declare("global_scale", of_all if scored_shared else None)
        scale = ParameterLayout((experts,), ones, partial_gradient=partial)
        self.declare("expert_scale", scale if config.moe_router_expert_scale else None)
        # A parameter, so that checkpoints hold it, but not a trained one: the optimizer leaves it alone.
        kept_by_itself = ParameterLayout((experts,), zeros, dtype=torch.float32, trained=False)
        has_bias = config.moe_router_enable_expert_bias and not self.is_hashed
        self.declare("expert_bias", kept_by_itself if has_bias else None)
        self.declare("token_experts", None if hashed_vocab is None else _table_layout(config, hashed_vocab))
        self.register_buffer("faults", torch.zeros((), device=ctx.device), persistent=False)
        self.jitter = InputJitter(config.moe_input_jitter_eps, ctx)
        self.losses = BalanceLosses(config, layer, ctx)
        self.counter = LoadCounter(experts, ctx)
        self.load: Load | None = None
        """Metrics of the last step."""
        self.bias_range: Tensor | None = None
        """[2]: the smallest and the largest expert bias after the last step."""

    def forward(self, share: TokenShare, ids: Tensor | None = None) -> Routing:
        """ids [T]: of the tokens, which a table of experts needs. Raises TrainingError for non-finite logits on a CPU;
        on a GPU sets a flag without synchronizing."""
        logits, of_shared = self._apart(self.logits(self.jitter(share)))
        experts = self.choose(logits, share, ids)
        if of_shared is None:
            weights, shared = self._weights(logits, experts), None
        else:
            weights, shared = self._weights_beside(logits, experts, of_shared)
        # Before tokens are dropped: dropping would hide an uneven choice.
        counts = count_occurrences(experts, self.config.num_scored) if self.training else None
        # share.total is that of all ranks, so all of them take part in the losses' reductions, or none.
        if (
            self.training
            and torch.is_grad_enabled()
            and self.losses.coefficients
            and share.total
            and not self.is_hashed
        ):
            weights = self.losses(weights, self._scored(logits, experts, counts, share))
        kept, capacity = self._capacity(experts, weights)
        if counts is not None:
            weights = self._counted(weights, counts, kept)
        if self.config.moe_num_zero_experts:
            return self._without_zero_experts(experts, weights, counts)
        padded_to = capacity if self.config.moe_pad_expert_input_to_capacity else None
        return Routing(experts, weights, self.config.num_experts, kept, padded_to, self.training, counts, shared=shared)

    def logits(self, tokens: Tensor) -> Tensor:
        """[T, H] -> [T, E + scored_shared] in moe_router_dtype"""
        # Never below fp32: with 16 bits, logits of different experts round to equal numbers, and the choice becomes
        # arbitrary.
        dtype = torch.promote_types(DTYPES[self.config.moe_router_dtype], tokens.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = F.linear(tokens.to(dtype), self.weight.to(dtype), bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        # 0 for finite logits; 0 * inf and 0 * NaN are NaN, which stays. No host reads it here.
        self.faults += 0.0 * logits.detach().sum()
        if logits.device.type == "cpu":  # on a GPU this would synchronize; the step's check of the flag reports it
            require_finite(logits, self.name)
        return logits

    @property
    def name(self) -> str:
        return f"decoder.layers.{self.layer}.mlp.router"

    def fault(self) -> str | None:
        return f"the logits of {self.name}" if bool(self.faults.isnan()) else None

    def choose(self, logits: Tensor, share: TokenShare, ids: Tensor | None = None) -> Tensor:
        """[T, E] -> experts [T, k]"""
        config = self.config
        # A plan deals experts out where scores are ranked; a table on the meta device has no numbers of any.
        if self.token_experts is not None and not logits.is_meta:
            assert ids is not None
            return experts_of_tokens(self.token_experts, ids)
        if config.moe_router_force_load_balancing:
            return deal_in_turn(logits, config.moe_router_topk)
        if config.moe_router_random_seed is not None:
            return draw_at_random(logits, config.moe_router_topk, config.moe_router_random_seed)
        # In evaluation the choice must not depend on the other tokens of the batch: the plain top-k follows.
        if config.uses_sinkhorn and self.training:
            with torch.no_grad():
                scores = sinkhorn(logits.detach(), share.total, share.sum)
            return scores.topk(config.moe_router_topk).indices
        return choose_experts(logits, config, self.expert_bias)

    def after_step(self) -> None:
        """Reduce the step's load over all ranks, and update the expert bias towards an even load."""
        self.load = self.counter.take()
        if self.expert_bias is not None:
            self._move_bias(self.load.tokens)

    def metrics(self) -> Mapping[str, float]:
        """The load of the last step, over all ranks."""
        if self.load is None:
            return {}
        metrics = {
            "load_max_over_mean": self.load.max_over_mean,
            "load_entropy": self.load.entropy,
            "dead_experts": float(self.load.dead_experts),
            "dropped_share": self.load.dropped_share,
        }
        if self.bias_range is not None:
            # One copy to the host for both.
            low, high = self.bias_range.tolist()
            metrics |= {"expert_bias_min": low, "expert_bias_max": high}
        return {f"moe/layer_{self.layer}/{name}": value for name, value in metrics.items()}

    @torch.no_grad()
    def _move_bias(self, tokens: Tensor) -> None:
        """Loss-free balancing (Wang et al., 2024): +rate for experts below the mean load, -rate above it."""
        assert self.expert_bias is not None
        # The sign alone, as in the paper: the size of the imbalance does not enter. All ranks have the same load, so
        # the replicas of the bias stay equal.
        direction = (tokens.mean() - tokens).sign().to(self.expert_bias.dtype)
        step = self.config.moe_router_bias_update_rate * direction
        bias: Any = self.expert_bias
        is_sliced = hasattr(bias, "full_tensor")  # a DTensor of FSDP2
        if is_sliced:
            # Takes a second to import, in each process that trains.
            from torch.distributed.tensor import distribute_tensor

            # None: each rank takes its own part of what all have, and sends nothing.
            step = distribute_tensor(step, bias.device_mesh, bias.placements, src_data_rank=None)
        bias += step
        whole = bias.full_tensor() if is_sliced else bias
        self.bias_range = torch.stack(whole.aminmax())

    def _weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        config = self.config
        if config.uses_sinkhorn:
            weights = sinkhorn_weights(logits, experts)
        else:
            weights = expert_weights(
                logits,
                experts,
                config.moe_router_score_function,
                config.moe_router_pre_softmax,
                biased=self.expert_bias is not None,
                epsilon=config.moe_router_weight_epsilon,
            )
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[experts].to(weights.dtype)
        factor = config.moe_router_topk_scaling_factor
        return weights if factor is None else weights * factor

    def _apart(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of the experts that a token chooses among [T, E], and of shared ones [T, scored_shared]."""
        if not self.scored_shared:
            return logits, None
        chosen_among, shared = logits.split((self.config.num_scored, self.scored_shared), 1)
        return chosen_among, shared

    def _weights_beside(self, logits: Tensor, experts: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the chosen experts [T, k], and of the shared ones [T, n]."""
        assert self.global_scale is not None
        weights = weights_beside_shared(logits, experts, shared)
        factor = self.config.moe_router_topk_scaling_factor or 1.0
        chosen, rest = (weights * factor * self.global_scale).split((experts.shape[1], self.scored_shared), 1)
        return chosen, rest

    def _scored(self, logits: Tensor, experts: Tensor, counts: Tensor | None, share: TokenShare) -> Scored:
        probabilities = distribution(logits, self.config.balance_score_function)
        # The losses count the plain top-k (see mt_moe.routing.balance).
        if not self._is_plain_topk or counts is None:
            experts = probabilities.detach().topk(experts.shape[1]).indices
            counts = count_occurrences(experts, self.config.num_scored)
        return Scored(logits, probabilities, experts, counts, share)

    def _without_zero_experts(self, experts: Tensor, weights: Tensor, counts: Tensor | None) -> Routing:
        """The choices of experts that return the token are dropped: it needs to be sent to no rank for them."""
        size = self.config.num_experts
        kept = experts < size
        counts = None if counts is None else counts[:size]
        identity = weights.masked_fill(kept, 0.0).sum(1)
        return Routing(experts, weights, size, kept, None, self.training, counts, identity)

    @property
    def _is_plain_topk(self) -> bool:
        """Whether a token's experts are the plain top-k of its scores (no bias, no groups, no forced balance)."""
        config = self.config
        return not (
            config.moe_router_enable_expert_bias
            or config.moe_router_num_groups
            or config.moe_router_force_load_balancing
            or config.moe_router_random_seed is not None
            or config.uses_sinkhorn
        )

    def _capacity(self, experts: Tensor, weights: Tensor) -> tuple[Tensor | None, int | None]:
        config = self.config
        if config.moe_expert_capacity_factor is None:
            return None, None
        tokens, topk = experts.shape
        capacity = expert_capacity(tokens, topk, config.num_experts, config.moe_expert_capacity_factor)
        return keep_within(experts, weights, config.num_experts, capacity, config.moe_token_drop_policy), capacity

    def _counted(self, weights: Tensor, counts: Tensor, kept: Tensor | None) -> Tensor:
        dropped = None if kept is None else kept.logical_not().sum()
        return on_backward(weights, lambda: self.counter.add(counts, dropped))


def _table_layout(config: MoeConfig, vocab: int) -> ParameterLayout:
    # fp32, which has all numbers of experts: parameters of integers are cast with the others by optimizers and FSDP2.
    init = partial(dealt_experts, experts=config.num_experts)
    return ParameterLayout((vocab, config.moe_router_topk), init, dtype=torch.float32, trained=False)


def require_finite(logits: Tensor, router: str) -> None:
    """Raises TrainingError, naming the router and a token."""
    # One reduction in the usual case. A sum of finite logits may overflow too, hence the second look.
    if bool(logits.sum().isfinite()):
        return
    bad = logits.isfinite().logical_not().any(1).nonzero().flatten()
    if len(bad):
        raise TrainingError(
            f"{router}: the logits of {len(bad)} of {len(logits)} tokens are not finite "
            f"(first: token {int(bad[0])}); lower optimizer.lr, set model.moe.moe_z_loss_coeff, or look at the "
            "weights that were loaded"
        )
