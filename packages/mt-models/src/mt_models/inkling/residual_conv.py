"""A causal depthwise convolution beside the identity: y = x + conv(x), in fp32.

A channel of a position is a sum over the same channel of the last k positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.cache import Cache, SequenceState
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, sequence_axes
from mt_core.parallel.collectives import gather_from
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.convolutions import causal_conv, plain_conv, with_past
from mt_models.blocks.mamba_mixer import uniform


class ResidualConv(LayoutModule):
    """[B, S, C] -> the same; weight [C, 1, k] in fp32 whatever the precision of the model is.

    sharded: the channels are those of this rank's heads, at all positions. Otherwise every rank has all channels, with
    sequence parallelism at its own positions.
    """

    weight: Tensor

    def __init__(self, channels: int, taps: int, ctx: ParallelContext, *, sharded: bool) -> None:
        super().__init__(ctx)
        self.divides_sequence = ctx.sequence_parallel and not sharded
        layout = ParameterLayout(
            (channels, 1, taps),
            uniform(1.0 / math.sqrt(taps)),
            (Split(dim=0, axis="tp"),) if sharded else (),
            partial_gradient=() if sharded else sequence_axes(ctx),
            dtype=torch.float32,
        )
        self.declare("weight", layout)

    def forward(self, x: Tensor, pattern: AttentionPattern, cache: Cache | None) -> Tensor:
        wide = x.float()
        if cache is not None:
            mixed = cache.advance(self, self._advance, (wide,))
        elif self.divides_sequence:
            mixed = self._convolve_shard(wide, pattern.segment_ids)
        else:
            mixed = plain_conv(wide, self.taps, None, pattern.segment_ids)
        return (wide + mixed).to(x.dtype)

    @property
    def taps(self) -> Tensor:
        """[C, k]"""
        return self.weight.squeeze(1).float()

    def _advance(self, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        (x,), (past,) = inputs, state
        # Of [past, new] the last k - 1: fewer new positions than that leave some of the past.
        return causal_conv(x, self.taps, None, past), (with_past(x, past.shape[1], past)[:, x.shape[1] :],)

    def _convolve_shard(self, x: Tensor, segment_ids: Tensor | None) -> Tensor:
        """x [B, S / tp, C], of positions of this rank -> the same, from these and the k - 1 before them."""
        length, tp = x.shape[1], self.ctx.tp
        first = tp.rank * length
        start = max(first - (self.weight.shape[2] - 1), 0)
        read = gather_from(x, 1, tp)[:, start : first + length]
        segments = None if segment_ids is None else segment_ids[:, start : first + length]
        return plain_conv(read, self.taps, None, segments)[:, first - start :]

    def cached_state(self) -> SequenceState:
        """The last k - 1 inputs."""
        channels, _, taps = self.weight.shape
        return SequenceState((((taps - 1, channels), torch.float32),))
