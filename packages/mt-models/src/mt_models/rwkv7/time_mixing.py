"""Time mixing of RWKV-7, which takes the place of attention: token shift, low-rank decays, rates and gates, the
recurrence, a norm of each head, a projection out.

Shapes: B batch, S sequence, H hidden, N heads of D channels (this rank's under tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.batch_invariance import is_batch_invariant
from mt_core.nn.cache import Cache, SequenceState
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split, constant, normal, ones, zeros
from mt_core.nn.linear import SEQUENCE_DIM, ColumnParallelLinear, RowParallelLinear
from mt_core.parallel.collectives import gather_copies
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.delta_backends import RWKV7, RuleSizes, build_rules
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.rwkv7_rule import LOWEST_DECAY, Rwkv7Inputs, recurrent_rwkv7_rule
from mt_models.blocks.token_shift import TokenShift
from mt_models.rwkv7.config import Rwkv7Config
from mt_models.rwkv7.initial_values import (
    initial_decays,
    initial_key_scales,
    initial_mix,
    initial_rates,
    initial_value_mix,
)

INPUTS = ("r", "w", "k", "v", "a", "g")
"""What is computed from x_t + mix (x_(t-1) - x_t), each with a mix of its own: rows of `mix`."""
PASSED_ON = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""Exponents of the initial mixes."""


def whole_sequences(x: Tensor, ctx: ParallelContext) -> Tensor:
    """[B, S, H], sharded along S with sequence parallelism -> whole, on every rank: a position reads the one before."""
    # gather_copies: what follows is replicated up to column-parallel layers, which all-reduce the gradient.
    return gather_copies(x, SEQUENCE_DIM, ctx.tp) if ctx.sequence_parallel else x


class LowRank(nn.Module):
    """up(activation(down(x))): [B, S, H] whole on every rank -> [B, S, N D] of this rank."""

    def __init__(
        self,
        config: Rwkv7Config,
        rank: int,
        ctx: ParallelContext,
        activation: Callable[[Tensor], Tensor] | None,
        bias: Init | None,
    ) -> None:
        super().__init__()
        hidden, init = config.hidden_size, normal(config.init_method_std)
        self.activation = activation
        self.down = ReplicatedLinear(hidden, rank, ctx, init=init, bias=False)
        self.up = ColumnParallelLinear(rank, hidden, ctx, bias=bias is not None, init=init)
        if bias is not None:
            self.up.layouts["bias"] = replace(self.up.layouts["bias"], init=bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(x)
        return self.up(inner if self.activation is None else self.activation(inner))


class HeadGroupNorm(LayoutModule):
    """LayerNorm of each head with a weight and a bias of each channel: [B, S, N, D] -> [B, S, N D]."""

    weight: Tensor
    bias: Tensor

    def __init__(self, channels: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.eps, split = eps, (Split(dim=0, axis="tp"),)
        self.declare("weight", ParameterLayout((channels,), ones, split))
        self.declare("bias", ParameterLayout((channels,), zeros, split))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps).flatten(-2)
        return (normed * self.weight.float() + self.bias.float()).to(x.dtype)


class Rwkv7Scan(nn.Module):
    """The recurrence over whole sequences, or from a cached state."""

    def __init__(self, config: Rwkv7Config, ctx: ParallelContext) -> None:
        super().__init__()
        size = config.head_size
        self.state_shape = (config.num_heads // ctx.tp.size, size, size)
        sizes = RuleSizes.of(ctx, size, size)
        self.rules = build_rules(RWKV7, config.linear_attention_backend, config.chunk_size, sizes)
        self.rule, self.step = self.rules.whole, self.rules.step

    def use_kernels(self, kernels: Kernels) -> None:
        self.rules.note("RWKV-7", kernels)

    def forward(self, inputs: Rwkv7Inputs, segment_ids: Tensor | None, cache: Cache | None) -> Tensor:
        if cache is not None:
            return cache.advance(self, self._advance, tuple(inputs))
        # Where the chunks of a sequence begin depends on how it is decoded.
        rule = recurrent_rwkv7_rule if is_batch_invariant() else self.rule
        return rule(inputs, segment_ids=segment_ids)[0]

    def _advance(self, new: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        rule = self.step if new[0].shape[1] == 1 else self.rule
        o, last = (recurrent_rwkv7_rule if is_batch_invariant() else rule)(Rwkv7Inputs(*new), state=state[0])
        return o, (last,)

    def cached_state(self) -> SequenceState:
        """The state sums over the whole sequence: fp32."""
        return SequenceState(((self.state_shape, torch.float32),))


class TimeMixing(LayoutModule):
    """Layer `number`: normed x [B, S, H], values of the first layer [B, S, N D] -> what is added to x, the values."""

    mix: Tensor
    key_scale: Tensor
    key_rate: Tensor
    bonus: Tensor

    def __init__(self, config: Rwkv7Config, ctx: ParallelContext, number: int) -> None:
        super().__init__(ctx)
        hidden, self.size = config.hidden_size, config.head_size
        depth, init = number / max(config.num_layers - 1, 1), normal(config.init_method_std)
        height = 1.0 - number / config.num_layers
        # Sequences are whole within the block.
        inner = replace(ctx, sequence_parallel=False)
        self.shift = TokenShift(hidden, ctx.params_dtype)
        mixes = initial_mix([PASSED_ON[name] * height for name in INPUTS])
        self.declare("mix", ParameterLayout((len(INPUTS), hidden), mixes))
        split = (Split(dim=0, axis="tp"),)
        self.declare("key_scale", ParameterLayout((hidden,), initial_key_scales, split))
        self.declare("key_rate", ParameterLayout((hidden,), constant(1.02), split))
        self.declare("bonus", ParameterLayout((config.num_heads, self.size), constant(-0.04), split))

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(hidden, hidden, inner, bias=False, init=init)

        self.linear_r, self.linear_k, self.linear_v = column(), column(), column()
        self.decay = LowRank(config, config.decay_lora_rank, inner, torch.tanh, initial_decays(depth, self.size))
        self.rate = LowRank(config, config.rate_lora_rank, inner, None, initial_rates(self.size))
        self.gate = LowRank(config, config.gate_lora_rank, inner, torch.sigmoid, None)
        # The first layer has no values before its own.
        self.value_mix: LowRank | None = None
        if number:
            self.value_mix = LowRank(config, config.value_lora_rank, inner, None, initial_value_mix)
        self.scan = Rwkv7Scan(config, ctx)
        self.out_norm = HeadGroupNorm(hidden, self.size * config.norm_epsilon, ctx)
        self.linear_proj = RowParallelLinear(hidden, hidden, ctx, bias=False, init=normal(config.output_init_std))

    def forward(
        self, x: Tensor, first_values: Tensor | None, segment_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        x = whole_sequences(x, self.ctx)
        delta = self.shift(x, segment_ids, cache) - x
        xr, xw, xk, xv, xa, xg = (torch.addcmul(x, delta, mix) for mix in self.mix)
        v = self.linear_v(xv)
        if self.value_mix is None:
            first_values = v
        else:
            assert first_values is not None
            v = torch.lerp(v, first_values, self.value_mix(xv).sigmoid())
        r, k, w, a = self.linear_r(xr), self.linear_k(xk), self.decay(xw), self.rate(xa).sigmoid()
        # fp32: decays are summed over positions in the exponent.
        w = LOWEST_DECAY * w.float().sigmoid()
        z = F.normalize(self._heads(k * self.key_scale), dim=-1)
        k = k * (1 + (a - 1) * self.key_rate)
        r, w, k, v, a = (self._heads(y) for y in (r, w, k, v, a))
        o = self.out_norm(self.scan(Rwkv7Inputs(r, w, k, v, z, a), segment_ids, cache))
        # What a position writes it reads with a weight of its own, beside the state.
        bonus = (r * k * self.bonus).sum(-1, keepdim=True) * v
        return self.linear_proj((o + bonus.flatten(2)) * self.gate(xg)), first_values

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, N D] -> [B, S, N, D]"""
        return x.unflatten(-1, (-1, self.size))
