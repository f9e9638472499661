"""Load-balancing losses, and the load of experts. Shapes: T tokens of this rank, E experts, k experts of each token.

p [T, E] are each token's scores normalized to sum 1, c[e] is how many tokens have e among their k highest scores:

    balance = E / (k T^2)  sum_e c[e] sum_t p[t, e]

which is 1 for an even load (Fedus et al., Switch Transformers, 2021). c counts the top-k of the plain scores, without
expert bias, capacity and groups: these hide the imbalance that the loss is to reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.nn.auxiliary import AuxiliaryLoss
from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import ParallelContext
from mt_moe.config import MoeConfig
from mt_moe.permutation import count_occurrences
from mt_moe.tokens import TokenShare

# -- expert load: tokens of each expert, over a step and over all ranks ------------------------------
#
# A micro-batch is counted in its backward pass: that runs once even if the forward pass is recomputed, and never in an
# evaluation.


class _OnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grads[0], None


def on_backward(x: Tensor, call: Callable[[], object]) -> Tensor:
    """Identity on x; `call` is called in the backward pass, when the gradient of x is ready."""
    # Without a gradient there is no backward pass, and nothing to count: an evaluation.
    return _OnBackward.apply(x, call) if x.requires_grad else x


@dataclass(frozen=True)
class Load:
    """The load of a step over all ranks. window: [E + 1] fp64 on the device, choices of each expert before dropping,
    and dropped choices."""

    window: Tensor

    @property
    def tokens(self) -> Tensor:
        """[E] fp64 on the device: choices of each expert."""
        return self.window[:-1]

    @cached_property
    def _on_host(self) -> tuple[list[float], float]:
        """(choices of each expert, dropped choices): one copy to the host for all metrics, made when one is logged."""
        *tokens, dropped = self.window.tolist()
        return tokens, dropped

    @property
    def max_over_mean(self) -> float:
        """Largest load over mean load: 1 for an even load, E if one expert has all."""
        tokens, _ = self._on_host
        return max(tokens) * len(tokens) / sum(tokens) if any(tokens) else 0.0

    @property
    def entropy(self) -> float:
        """Entropy of the load, relative to that of an even load: 1 is even, 0 is one expert."""
        tokens, _ = self._on_host
        if len(tokens) == 1:
            return 1.0
        total = sum(tokens)
        shares = [count / total for count in tokens if count]
        return -sum(share * math.log(share) for share in shares) / math.log(len(tokens))

    @property
    def dead_experts(self) -> int:
        return self._on_host[0].count(0.0)

    @property
    def dropped_share(self) -> float:
        tokens, dropped = self._on_host
        return dropped / max(sum(tokens), 1.0)


class LoadCounter(nn.Module):
    """Counts the choices of this rank's tokens until the end of a step."""

    window: Tensor

    def __init__(self, num_experts: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx = ctx
        # fp64 represents every count exactly, and every backend can all-reduce it.
        window = torch.zeros(num_experts + 1, dtype=torch.float64, device=ctx.device)
        self.register_buffer("window", window, persistent=False)

    def add(self, counts: Tensor, dropped: Tensor | None) -> None:
        """counts: [E] choices. dropped: scalar."""
        self.window[:-1] += counts
        if dropped is not None:
            self.window[-1] += dropped

    def take(self) -> Load:
        """The load over all ranks since the last call; collective over the ranks of the layer's stage."""
        window = self.window.clone()
        self.window.zero_()
        # Every token is routed by exactly one of these ranks (see mt_moe.tokens).
        for axis in (self.ctx.tp, self.ctx.dp_cp):
            if axis.size > 1:
                window = all_reduce(window, axis)
        return Load(window)


@dataclass(frozen=True)
class Scored:
    """logits, probabilities: [T, E]; choices: [T, k], each token's experts of the highest scores; counts: [E] int64,
    how many tokens chose each."""

    logits: Tensor
    probabilities: Tensor
    choices: Tensor
    counts: Tensor
    share: TokenShare


def balance(probabilities: Tensor, counts: Tensor, tokens: float | Tensor, topk: int) -> Tensor:
    """E / (k T^2) sum_e counts[..., e] probabilities[..., e]; both are sums over `tokens` tokens."""
    experts = counts.shape[-1]
    return experts / (topk * tokens**2) * (probabilities * counts).sum(-1)


class AuxLoss(nn.Module):
    """The balance loss over the tokens of a micro-batch, over all ranks that hold some of them."""

    def forward(self, scored: Scored) -> Tensor:
        counts = scored.counts.to(scored.logits.dtype)
        # Stacked [2, E]: one all-reduce for both.
        sums, counts = scored.share.sum(torch.stack([scored.probabilities.sum(0), counts])).unbind()
        return balance(sums, counts, scored.share.total, scored.choices.shape[1])


class SequenceAuxLoss(nn.Module):
    """The mean over sequences of each one's balance loss (DeepSeek-V3, 2024), so that it is independent of the number
    of micro-batches."""

    def forward(self, scored: Scored) -> Tensor:
        share, experts = scored.share, scored.logits.shape[1]
        zeros = scored.logits.new_zeros(share.num_sequences, experts)
        # [sequences, E]
        sums = zeros.index_add(0, share.sequence, scored.probabilities)
        # [T, k]: the index of (sequence, expert) in a flat [sequences * E] table
        cells = share.sequence[:, None] * experts + scored.choices
        counts = count_occurrences(cells, sums.numel()).to(sums.dtype).view_as(sums)
        sums, counts = share.sum(torch.stack([sums, counts])).unbind()
        return balance(sums, counts, share.total / share.num_sequences, scored.choices.shape[1]).mean()


class GlobalAuxLoss(nn.Module):
    """The balance loss with counts over all data-parallel ranks and the step's micro-batches so far (Qiu et al., Demons
    in the Detail, 2025): documents of one subject may use few experts as long as the whole batch is balanced."""

    seen: Tensor

    def __init__(self, num_experts: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx = ctx
        # Counts of the micro-batches whose backward pass is done; the last element is their number of tokens.
        self.register_buffer(
            "seen", torch.zeros(num_experts + 1, dtype=torch.float64, device=ctx.device), persistent=False
        )

    def forward(self, scored: Scored) -> Tensor:
        share = scored.share
        counts = scored.counts.to(scored.logits.dtype)
        sums, counts = share.sum(torch.stack([scored.probabilities.sum(0), counts])).unbind()
        here = torch.cat([counts.detach().double(), self.seen.new_full((1,), share.total)])
        if self.ctx.dp.size > 1:
            here = all_reduce(here, self.ctx.dp)
        # so_far [E + 1]: counts, and in the last element tokens.
        *_, tokens = so_far = self.seen + here
        frequencies = (so_far[:-1] / tokens).to(sums.dtype)  # k / E each when the load is even
        # Both arguments are means over tokens, hence the number of tokens 1.
        loss = balance(sums / share.total, frequencies, 1.0, scored.choices.shape[1])
        # Recomputation runs forward() twice and backward once, and the second forward pass has to see what the first
        # one saw.
        return on_backward(loss, lambda: self.seen.add_(here))

    def after_step(self) -> None:
        self.seen.zero_()


class ZLoss(nn.Module):
    """mean over tokens of logsumexp(logits)^2, which keeps logits small (Zoph et al., ST-MoE, 2022)."""

    def forward(self, scored: Scored) -> Tensor:
        return scored.share.sum(scored.logits.logsumexp(-1).square().sum()) / scored.share.total


class BalanceLosses(nn.Module):
    """The configured losses, each with its coefficient, reported as `moe/layer_{i}/{name}`."""

    def __init__(self, config: MoeConfig, layer: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.coefficients = loss_coefficients(config)
        self.losses = nn.ModuleDict({name: _build(name, config, ctx) for name in self.coefficients})
        self.attached = nn.ModuleDict({name: AuxiliaryLoss(f"moe/layer_{layer}/{name}") for name in self.coefficients})

    def forward(self, weights: Tensor, scored: Scored) -> Tensor:
        """Attaches the losses to the autograd graph of the weights [T, k], and returns the weights."""
        for name, coefficient in self.coefficients.items():
            weights = self.attached[name](weights, coefficient * self.losses[name](scored))
        return weights


def loss_coefficients(config: MoeConfig) -> Mapping[str, float]:
    """Every loss of the router and its coefficient."""
    if config.moe_z_loss_coeff is None:
        return config.balance_coefficients
    return {**config.balance_coefficients, "z_loss": config.moe_z_loss_coeff}


def _build(name: str, config: MoeConfig, ctx: ParallelContext) -> nn.Module:
    if name == "global_aux_loss":
        return GlobalAuxLoss(config.num_scored, ctx)
    plain: dict[str, Any] = {"aux_loss": AuxLoss, "seq_aux_loss": SequenceAuxLoss, "z_loss": ZLoss}
    return plain[name]()
