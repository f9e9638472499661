"""Gated short convolution over the sequence in place of attention (LFM2).

    b, c, u = split(in_proj(x))          y = out_proj(c * conv(b * u))

The convolution is causal and depthwise: a channel of a position is a sum over the same channel of the last k positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.cache import Cache, SequenceState
from mt_core.nn.context_parallel.masks import SegmentGatherer
from mt_core.nn.context_parallel.ulysses import to_heads, to_tokens
from mt_core.nn.context_parallel.zigzag import in_order
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, normal, zeros
from mt_core.nn.linear import RowParallelLinear
from mt_core.parallel.context import Axis, ParallelContext
from mt_models.blocks.convolutions import PLAIN, Convolutions, picked_convolutions, plain_conv
from mt_models.blocks.linear import PackedColumnParallelLinear
from mt_models.blocks.mamba_mixer import uniform
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import LayerConfigLike, TransformerLayer


class ShortConvConfigLike(LayerConfigLike, Protocol):
    """What the layer reads from the configuration of its model."""

    @property
    def conv_kernel(self) -> int: ...
    @property
    def conv_bias(self) -> bool: ...


class DepthwiseConv(LayoutModule):
    """The taps of each channel [H, 1, k], and a bias; tensor parallelism shards the channels."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, channels: int, taps: int, ctx: ParallelContext, *, bias: bool) -> None:
        super().__init__(ctx)
        split = (Split(dim=0, axis="tp"),)
        self.declare("weight", ParameterLayout((channels, 1, taps), uniform(1.0 / math.sqrt(taps)), split))
        self.declare("bias", ParameterLayout((channels,), zeros, split) if bias else None)


class ShortConvolution(nn.Module):
    """[batch, sequence, hidden] -> the same."""

    def __init__(self, config: ShortConvConfigLike, ctx: ParallelContext) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.conv_bias
        self.in_proj = PackedColumnParallelLinear(
            hidden, (hidden, hidden, hidden), ctx, bias=bias, init=normal(config.init_method_std)
        )
        self.conv = DepthwiseConv(hidden, config.conv_kernel, ctx, bias=bias)
        self.out_proj = RowParallelLinear(hidden, hidden, ctx, bias=bias, init=normal(config.output_init_std))
        self.cp = ctx.cp
        self._use(PLAIN)

    def use_kernels(self, kernels: Kernels) -> None:
        self._use(picked_convolutions(kernels, self.conv.weight.shape[2]))

    def _use(self, convolutions: Convolutions) -> None:
        self.convolutions, whole = convolutions, convolutions.whole
        self.convolve_shards = ConvolutionOfShards(self.cp, whole) if self.cp.size > 1 else whole

    def forward(self, x: Tensor, pattern: AttentionPattern, cache: Cache | None) -> Tensor:
        # [B, S, channels of this rank] each; with sequence parallelism in_proj gathers S.
        b, c, u = self.in_proj(x)
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        if cache is None:
            mixed = self.convolve_shards(b * u, weight, bias, pattern.segment_ids)
        else:
            mixed = self._advance(b * u, weight, bias, cache)
        return self.out_proj(c * mixed)

    def _advance(self, x: Tensor, weight: Tensor, bias: Tensor | None, cache: Cache) -> Tensor:
        def advance(inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            (x,), (past,) = inputs, state
            mixed, kept = self.convolutions.step(x, weight, bias, past)
            return mixed, (kept,)

        return cache.advance(self, advance, (x,))

    def cached_state(self) -> SequenceState:
        """The last k - 1 inputs of the convolution."""
        channels, _, taps = self.conv.weight.shape
        return SequenceState((((taps - 1, channels), self.in_proj.weight.dtype),))


class ConvolutionOfShards:
    """`plain_conv`, or what computes the same, for tensors in zig-zag shards: an all-to-all gives each rank whole
    sequences of its share of the channels, and a second one sends the results back. Collective."""

    def __init__(self, axis: Axis, convolve: Callable[..., Tensor] = plain_conv) -> None:
        self.axis, self._convolve = axis, convolve
        self.gather_segments = SegmentGatherer(
            axis, lambda shards: in_order(shards.movedim(0, 1).flatten(1, 2), 1, axis.size)
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None) -> Tensor:
        # Channels take the place of heads, of one number each. The gradient of a rank's taps is complete and that of
        # the others zero: the sum over ranks is that of one process.
        (whole,) = to_heads((x[..., None],), self.axis)
        taps, biases = (None if part is None else part.chunk(self.axis.size)[self.axis.rank] for part in (weight, bias))
        assert taps is not None
        mixed = self._convolve(whole.squeeze(-1), taps, biases, self.gather_segments(segment_ids))
        return to_tokens(mixed[..., None], self.axis).squeeze(-1)


class ShortConvLayer(TransformerLayer):
    """x + short_conv(norm(x)), then x + feed_forward(norm(x)): [batch, sequence, hidden] -> the same."""

    def __init__(self, config: ShortConvConfigLike, feed_forward: nn.Module, ctx: ParallelContext) -> None:
        mixer = ShortConvolution(config, ctx)
        super().__init__(config, no_attention, feed_forward, ctx, mixer)
        del self.self_attention
        self.short_conv = mixer

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = self.input_layernorm.add(x)
        mixed = self.short_conv(normed, pattern, cache)
        x, normed = self.residual_and_norm(x, mixed, self.attention_dropout, self.pre_mlp_layernorm)
        return self.residual(x, self.mlp(normed), self.mlp_dropout)


def no_attention(*inputs: object) -> torch.Tensor:
    raise AssertionError("a layer with a convolution has no attention core")
