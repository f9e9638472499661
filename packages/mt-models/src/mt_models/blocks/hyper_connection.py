"""Manifold-constrained hyper-connections (DeepSeek, mHC, 2026): several residual streams in place of one.

For streams X [n, H] of a token and a block f, with z = W vec(X) / rms(vec(X)) in fp32, cut into n, n and n x n numbers
that are scaled and shifted:

    pre = sigmoid(z_1) + eps      post = 2 sigmoid(z_2)      C = sinkhorn(softmax(z_3) + eps)
    X <- post (x) f(sum over i of pre_i X_i) + C^T X

Sinkhorn's iteration makes the columns and then the rows of C sum to 1, in turn, so that the streams cannot grow with
depth. At the end of the model a head sums the streams with weights of the same kind as `pre`.

Streams are [B, S, n H] between layers and pipeline stages: those of a token side by side.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, normal, ones, sequence_axes, zeros
from mt_core.parallel.context import ParallelContext


class StreamConfigLike(Protocol):
    """What weights of streams read from the configuration of their model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def hyper_connection_streams(self) -> int: ...
    @property
    def hyper_connection_epsilon(self) -> float: ...


class HyperConnectionConfigLike(StreamConfigLike, Protocol):
    """What hyper-connections read beside it."""

    @property
    def hyper_connection_iterations(self) -> int: ...


class StreamWeights(LayoutModule):
    """Numbers of each token from its streams: scale * (weight vec(X) / rms(vec(X))) + bias, in fp32 as its parameters.

    weight [outputs, n H], bias [outputs], scale [scales]. first_bias, first_scale: their initial values.
    """

    weight: Tensor
    bias: Tensor
    scale: Tensor

    def __init__(
        self,
        config: StreamConfigLike,
        outputs: int,
        scales: int,
        ctx: ParallelContext,
        *,
        first_bias: Init = zeros,
        first_scale: Init = ones,
    ) -> None:
        super().__init__(ctx)
        self.streams, self.epsilon = config.hyper_connection_streams, config.norm_epsilon
        # Sequence parallelism gives each rank other positions.
        partial, width = sequence_axes(ctx), self.streams * config.hidden_size
        for name, shape, init in (
            ("weight", (outputs, width), normal(config.init_method_std)),
            ("bias", (outputs,), first_bias),
            ("scale", (scales,), first_scale),
        ):
            self.declare(name, ParameterLayout(shape, init, partial_gradient=partial, dtype=torch.float32))

    def products(self, streams: Tensor) -> Tensor:
        """[B, S, n H] -> weight vec(X) / rms(vec(X)), [B, S, outputs] in fp32"""
        wide = streams.float()
        # The norm has no weight: dividing the products by rms gives the same as dividing what is multiplied.
        # FSDP2 casts parameters to the dtype of the model.
        return F.linear(wide, self.weight.float()) * (wide.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()


class HyperConnection(StreamWeights):
    """The connection of one block with the streams."""

    def __init__(self, config: HyperConnectionConfigLike, ctx: ParallelContext) -> None:
        streams = config.hyper_connection_streams
        super().__init__(config, (2 + streams) * streams, 3, ctx)
        self.iterations, self.floor = config.hyper_connection_iterations, config.hyper_connection_epsilon

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, n H] -> the block's input [B, S, H], post [B, S, n] and C [B, S, n, n] in fp32"""
        n = self.streams
        parts = zip(self.products(streams).split((n, n, n * n), -1), self.bias.split((n, n, n * n)), strict=True)
        pre, post, mixed = (part * scale + bias for (part, bias), scale in zip(parts, self.scale, strict=True))
        block_input = weighted_sum(pre.sigmoid() + self.floor, streams)
        doubly_stochastic = sinkhorn(mixed.unflatten(-1, (n, n)).softmax(-1) + self.floor, self.iterations, self.floor)
        return block_input, 2.0 * post.sigmoid(), doubly_stochastic


class HyperHead(StreamWeights):
    """Sum of the streams [B, S, n H] -> [B, S, H], each with a weight sigmoid(.) + eps of the token."""

    def __init__(self, config: StreamConfigLike, ctx: ParallelContext, **first: Init) -> None:
        """first: see StreamWeights."""
        super().__init__(config, config.hyper_connection_streams, 1, ctx, **first)
        self.floor = config.hyper_connection_epsilon

    def forward(self, streams: Tensor) -> Tensor:
        return weighted_sum((self.products(streams) * self.scale + self.bias).sigmoid() + self.floor, streams)


class StreamOutput(nn.Module):
    """norm(sum of streams), the input of the LM head: [B, S, n H] -> [B, S, H]"""

    def __init__(self, config: StreamConfigLike, norm: nn.Module, ctx: ParallelContext, **first: Init) -> None:
        """first: see StreamWeights."""
        super().__init__()
        self.hyper_head = HyperHead(config, ctx, **first)
        self.norm = norm

    def forward(self, streams: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.hyper_head(streams))
        return normed


class StreamMean(nn.Module):
    """norm(mean of the streams), the input of the LM head: [B, S, n H] -> [B, S, H] (GLM-5.3-Flash)"""

    def __init__(self, streams: int, norm: nn.Module) -> None:
        super().__init__()
        self.streams, self.norm = streams, norm

    def forward(self, streams: Tensor) -> Tensor:
        normed: Tensor = self.norm(streams.unflatten(-1, (self.streams, -1)).mean(-2))
        return normed


def repeated(x: Tensor, streams: int) -> Tensor:
    """[B, S, H] -> [B, S, n H]: equal streams."""
    return x.repeat(1, 1, streams)


def weighted_sum(weights: Tensor, streams: Tensor) -> Tensor:
    """weights [B, S, n] in fp32, streams [B, S, n H] -> [B, S, H] in the dtype of the streams"""
    apart = streams.unflatten(-1, (weights.shape[-1], -1)).float()
    return (weights.unsqueeze(-2) @ apart).squeeze(-2).to(streams.dtype)


def mixed_streams(block_output: Tensor, post: Tensor, mixing: Tensor, streams: Tensor) -> Tensor:
    """post (x) block_output + C^T X: [B, S, H], [B, S, n], [B, S, n, n] and [B, S, n H] -> [B, S, n H]"""
    dtype, apart = streams.dtype, streams.unflatten(-1, (post.shape[-1], -1))
    added = post.to(dtype).unsqueeze(-1) * block_output.unsqueeze(-2)
    return (added + mixing.to(dtype).transpose(-1, -2) @ apart).flatten(-2)


def sinkhorn(matrices: Tensor, iterations: int, epsilon: float) -> Tensor:
    """[..., n, n], positive -> columns and then rows divided by their sums in turn, columns once more often."""

    def divided(x: Tensor, dim: int) -> Tensor:
        return x / (x.sum(dim, keepdim=True) + epsilon)

    matrices = divided(matrices, -2)
    for _ in range(iterations - 1):
        matrices = divided(divided(matrices, -1), -2)
    return matrices
