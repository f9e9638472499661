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

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.hyper_connection import (
    Connection,
    mixed_streams,
    normalized,
    read_streams,
    weighted_sum,
)
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

    weight [outputs, n H], bias [outputs], scale [scales]. first_bias, first_scale, first_weight: their initial values.
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
        first_weight: Init | None = None,
    ) -> None:
        super().__init__(ctx)
        self.streams, self.epsilon = config.hyper_connection_streams, config.norm_epsilon
        # Sequence parallelism gives each rank other positions.
        partial, width = sequence_axes(ctx), self.streams * config.hidden_size
        for name, shape, init in (
            ("weight", (outputs, width), first_weight or normal(config.init_method_std)),
            ("bias", (outputs,), first_bias),
            ("scale", (scales,), first_scale),
        ):
            self.declare(name, ParameterLayout(shape, init, partial_gradient=partial, dtype=torch.float32))

    def products(self, streams: Tensor) -> Tensor:
        """[B, S, n H] -> weight vec(X) / rms(vec(X)), [B, S, outputs] in fp32"""
        return normalized(self.projected(streams), streams, self.epsilon)

    def projected(self, streams: Tensor) -> Tensor:
        """[B, S, n H] -> weight vec(X), [B, S, outputs] in fp32"""
        # FSDP2 casts parameters to the dtype of the model.
        return F.linear(streams.float(), self.weight.float())


class HyperConnection(StreamWeights):
    """The connection of one block with the streams."""

    def __init__(self, config: HyperConnectionConfigLike, ctx: ParallelContext) -> None:
        streams = config.hyper_connection_streams
        super().__init__(config, (2 + streams) * streams, 3, ctx)
        self.connection = Connection(
            config.norm_epsilon, config.hyper_connection_epsilon, config.hyper_connection_iterations
        )
        self._read: Callable[..., tuple[Tensor, Tensor, Tensor]] = read_streams
        self._write: Callable[..., Any] = mixed_streams

    def use_kernels(self, kernels: Kernels) -> None:
        """Choose what computes all but the product. Raises ConfigError where the named kernel cannot serve."""
        self._read = kernels.pick("hyper_connection", width=self.streams)
        self._write = kernels.pick_fused("hyper_connection", width=self.streams) or mixed_streams

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, n H] -> the block's input [B, S, H], post [B, S, n] and C [B, S, n, n] in fp32"""
        return self._read(streams, self.projected(streams), self.bias, self.scale, self.connection)

    def mixed(self, block_output: Tensor, post: Tensor, mixing: Tensor, streams: Tensor) -> Tensor:
        """post (x) block_output + C^T X: [B, S, H], [B, S, n], [B, S, n, n] and [B, S, n H] -> [B, S, n H]"""
        mixed: Tensor = self._write(block_output, post, mixing, streams)
        return mixed


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
