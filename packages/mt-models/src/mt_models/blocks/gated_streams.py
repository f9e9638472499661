"""Several residual streams, mixed by gates of low rank (Qwen4-Exp, 2026).

For streams X [n, H] of a token and a block f, with N = the streams, each normalized by itself:

    gates = sigmoid(W_up silu(W_down vec(N) / n))  [n, H]        strengths = 2 sigmoid(W_inject vec(N) / n)  [n]
    X <- X + strengths (x) f(mean over streams of gates * N)

The norms of the streams are those of the block's input: it has none of its own. At the end of the model the same mean,
with gates of its own, is the input of the LM head. Streams are [B, S, n H] between layers and pipeline stages.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, sequence_axes, zeros
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.linear import ReplicatedLinear


class GatedStreamsConfigLike(Protocol):
    """What the mixing of streams reads from the configuration of its model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def residual_streams(self) -> int: ...
    @property
    def residual_mix_rank(self) -> int: ...


class StreamNorm(LayoutModule):
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over each of `streams` equal parts of the channels, in fp32: [B, S, n H]
    -> the same. weight [n H]; on the residual stream, which sequence parallelism shards."""

    weight: Tensor

    def __init__(self, config: GatedStreamsConfigLike, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.hidden, self.eps = config.hidden_size, config.norm_epsilon
        width = config.residual_streams * config.hidden_size
        self.declare("weight", ParameterLayout((width,), zeros, partial_gradient=sequence_axes(ctx)))

    def forward(self, streams: Tensor) -> Tensor:
        apart = streams.float().unflatten(-1, (-1, self.hidden))
        normed = F.rms_norm(apart, (self.hidden,), eps=self.eps).flatten(-2)
        return (normed * (1.0 + self.weight.float())).to(streams.dtype)


class StreamMixer(nn.Module):
    """Streams [B, S, n H] -> their gated mean [B, S, H]."""

    def __init__(self, config: GatedStreamsConfigLike, ctx: ParallelContext) -> None:
        super().__init__()
        self.streams, init = config.residual_streams, normal(config.init_method_std)
        width, rank = self.streams * config.hidden_size, config.residual_mix_rank
        self.norm = StreamNorm(config, ctx)
        self.mix_down_proj = ReplicatedLinear(width, rank, ctx, init=init, bias=False, on_sequence=True)
        self.mix_up_proj = ReplicatedLinear(rank, width, ctx, init=init, bias=False, on_sequence=True)

    def forward(self, streams: Tensor) -> Tensor:
        return self.mixed(self.norm(streams))

    def mixed(self, normed: Tensor) -> Tensor:
        gates = self.mix_up_proj(F.silu(self.mix_down_proj(normed) / self.streams)).sigmoid()
        return (gates * normed).unflatten(-1, (self.streams, -1)).mean(-2)


class StreamConnection(StreamMixer):
    """The connection of one block with the streams."""

    def __init__(self, config: GatedStreamsConfigLike, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        width, init = self.streams * config.hidden_size, normal(config.init_method_std)
        self.inject_proj = ReplicatedLinear(width, self.streams, ctx, init=init, bias=False, on_sequence=True)

    def connect(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, n H] -> the block's input [B, S, H], and the strengths of its output in the streams [B, S, n]"""
        normed = self.norm(streams)
        return self.mixed(normed), 2.0 * (self.inject_proj(normed) / self.streams).sigmoid()


def with_output(streams: Tensor, output: Tensor, strengths: Tensor) -> Tensor:
    """X + strengths (x) output: [B, S, n H], [B, S, H] and [B, S, n] -> [B, S, n H]"""
    return streams + (output.unsqueeze(-2) * strengths.unsqueeze(-1)).flatten(-2)
