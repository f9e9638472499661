"""The Mamba-1 mixer with norms of time steps, B and C (Jamba).

    x, z = split(in_proj(hidden))      x = silu(conv(x))      dt, b, c = norms(split(x_proj(x)))
    y = scan(x, softplus(dt_proj(dt)), -exp(A_log), b, c) + D x          out = out_proj(y silu(z))

Shapes: C channels, N state size, R rank of the time steps. Tensor parallelism shards the channels.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.batch_invariance import is_batch_invariant
from mt_core.nn.cache import Cache, SequenceState
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split, normal, ones
from mt_core.nn.linear import RowParallelLinear, linear
from mt_core.nn.norm import RMSNorm
from mt_core.parallel.collectives import copy_to, reduce_from
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.convolutions import PLAIN, picked_convolutions
from mt_models.blocks.linear import PackedColumnParallelLinear
from mt_models.blocks.mamba_backends import SELECTIVE, Scan, build_scans
from mt_models.blocks.mamba_mixer import time_step_bias, uniform
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.selective_scan import selective_scan
from mt_models.blocks.short_conv import DepthwiseConv, no_attention
from mt_models.blocks.transformer import LayerConfigLike, TransformerLayer


class Mamba1ConfigLike(LayerConfigLike, Protocol):
    """What the layer reads from the configuration of its model."""

    @property
    def mamba_inner_size(self) -> int: ...
    @property
    def mamba_state_dim(self) -> int: ...
    @property
    def mamba_conv_kernel(self) -> int: ...
    @property
    def mamba_conv_bias(self) -> bool: ...
    @property
    def mamba_proj_bias(self) -> bool: ...
    @property
    def mamba_scan_backend(self) -> str: ...
    @property
    def time_step_rank(self) -> int: ...


class Mamba1Mixer(LayoutModule):
    """[batch, sequence, hidden] -> the same. A_log [C, N] and D [C] are fp32 whatever the dtype of other weights."""

    A_log: Tensor
    D: Tensor

    def __init__(self, config: Mamba1ConfigLike, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        hidden, inner, state = config.hidden_size, config.mamba_inner_size, config.mamba_state_dim
        rank, bias, init = config.time_step_rank, config.mamba_proj_bias, normal(config.init_method_std)
        self.sizes = (rank, state, state)
        by_channel = (Split(dim=0, axis="tp"),)
        self.in_proj = PackedColumnParallelLinear(hidden, (inner, inner), ctx, bias=bias, init=init)
        self.conv1d = DepthwiseConv(inner, config.mamba_conv_kernel, ctx, bias=config.mamba_conv_bias)
        self.convolutions = PLAIN
        self.scans = build_scans(SELECTIVE, config.mamba_scan_backend, ctx, state)
        self.x_proj = SummedLinear(inner, sum(self.sizes), ctx, init)
        # Of whole sequences on every rank, with whole gradients: see `parameters_of_scan`.
        self.dt_layernorm = RMSNorm(rank, config.norm_epsilon, ctx, ())
        self.b_layernorm = RMSNorm(state, config.norm_epsilon, ctx, ())
        self.c_layernorm = RMSNorm(state, config.norm_epsilon, ctx, ())
        self.dt_proj = TimeSteps(rank, inner, ctx)
        self.declare("A_log", ParameterLayout((inner, state), state_numbers, by_channel, dtype=torch.float32))
        self.declare("D", ParameterLayout((inner,), ones, by_channel, dtype=torch.float32))
        self.out_proj = RowParallelLinear(inner, hidden, ctx, bias=bias, init=normal(config.output_init_std))

    def use_kernels(self, kernels: Kernels) -> None:
        self.scans.note("Mamba-1", kernels)
        self.convolutions = picked_convolutions(kernels, self.conv1d.weight.shape[2])

    def forward(self, hidden: Tensor, segment_ids: Tensor | None, cache: Cache | None) -> Tensor:
        # [B, S, channels of this rank] each; with sequence parallelism in_proj gathers S.
        x, z = self.in_proj(hidden)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        if cache is not None:
            return self.out_proj(self._advance(x, weight, bias, cache) * F.silu(z))
        x = self.convolutions.whole(x, weight, bias, segment_ids, True)
        return self.out_proj(self.scan(x, None, segment_ids)[0] * F.silu(z))

    def scan(self, x: Tensor, state: Tensor | None, segment_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, S, C], behind the convolution -> the same, and the state [B, C, N]"""
        dt, b, c = self.parameters_of_scan(x)
        rates = -self.A_log.float().exp()
        y, state = self._recurrence(x, state)(x, dt, rates, b, c, state=state, segment_ids=segment_ids)
        return (y + x.float() * self.D).to(x.dtype), state

    def _recurrence(self, x: Tensor, state: Tensor | None) -> Scan:
        # Under batch invariance a position's result may not depend on which kernel its length chose.
        if is_batch_invariant():
            return selective_scan
        return self.scans.step if state is not None and x.shape[1] == 1 else self.scans.whole

    def parameters_of_scan(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, C] -> dt [B, S, C] in fp32, b and c [B, S, N]"""
        dt, b, c = self.x_proj(x).split(self.sizes, -1)
        normed = (self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c))
        # Each rank reads them for its own channels: backward sums over the ranks.
        dt, b, c = (copy_to(part, self.ctx.tp) for part in normed)
        return self.dt_proj(dt), b, c

    def _advance(self, x: Tensor, weight: Tensor, bias: Tensor | None, cache: Cache) -> Tensor:
        def advance(inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            (x,), (past, before) = inputs, state
            convolved, kept = self.convolutions.step(x, weight, bias, past, True)
            y, after = self.scan(convolved, before)
            return y, (kept, after)

        return cache.advance(self, advance, (x,))

    def cached_state(self) -> SequenceState:
        """The last k - 1 inputs of the convolution, and the state of the recurrence."""
        channels, _, taps = self.conv1d.weight.shape
        kept = ((taps - 1, channels), self.in_proj.weight.dtype)
        return SequenceState((kept, (tuple(self.A_log.shape), torch.float32)))


class SummedLinear(LayoutModule):
    """x W^T, summed over the ranks that hold the channels of x, without sharding the sequence: W [out, in]."""

    weight: Tensor

    def __init__(self, in_features: int, out_features: int, ctx: ParallelContext, init: Init) -> None:
        super().__init__(ctx)
        self.declare("weight", ParameterLayout((out_features, in_features), init, (Split(dim=1, axis="tp"),)))

    def forward(self, x: Tensor) -> Tensor:
        return reduce_from(linear(x, self.weight, None), self.ctx.tp)


class TimeSteps(LayoutModule):
    """softplus(x W^T + b) in fp32: [B, S, R] -> [B, S, channels of this rank]. The bias is fp32."""

    weight: Tensor
    bias: Tensor

    def __init__(self, rank: int, channels: int, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        by_channel = (Split(dim=0, axis="tp"),)
        self.declare("weight", ParameterLayout((channels, rank), uniform(rank**-0.5), by_channel))
        init = time_step_bias(1e-3, 0.1, 1e-4)
        self.declare("bias", ParameterLayout((channels,), init, by_channel, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(linear(x, self.weight, None).float() + self.bias)


def state_numbers(tensor: Tensor, generator: torch.Generator) -> None:
    """log(1), ..., log(N) in every row, as Gu and Dao start."""
    tensor.copy_(torch.arange(1, tensor.shape[1] + 1, dtype=tensor.dtype, device=tensor.device).log().expand_as(tensor))


class Mamba1Layer(TransformerLayer):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)): [batch, sequence, hidden] -> the same."""

    def __init__(self, config: Mamba1ConfigLike, feed_forward: nn.Module, ctx: ParallelContext) -> None:
        mixer = Mamba1Mixer(config, ctx)
        super().__init__(config, no_attention, feed_forward, ctx, mixer)
        del self.self_attention
        self.mixer = mixer

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = self.input_layernorm.add(x)
        mixed = self.mixer(normed, pattern.segment_ids, cache)
        x, normed = self.residual_and_norm(x, mixed, self.attention_dropout, self.pre_mlp_layernorm)
        return self.residual(x, self.mlp(normed), self.mlp_dropout)
