"""Hyper-connections whose streams are not mixed with each other (Hy4, Tencent, 2026).

For streams X [n, H] of a token and a block f, with z = W vec(X) / rms(vec(X)) in fp32, cut into n and n numbers that
are scaled and shifted:

    pre = sigmoid(z_1) + eps      post = magnitude sigmoid(z_2) + eps
    X <- X + post (x) f(sum over i of pre_i X_i)
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from mt_core.nn.kernels.reference.hyper_connection import weighted_sum
from mt_core.nn.layout import Init
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.hyper_connection import StreamConfigLike, StreamWeights


class IndependentConnectionConfigLike(StreamConfigLike, Protocol):
    """What the connections read from the configuration of their model."""

    @property
    def hyper_connection_magnitude(self) -> float: ...


class IndependentConnection(StreamWeights):
    """The connection of one block with the streams."""

    def __init__(self, config: IndependentConnectionConfigLike, ctx: ParallelContext) -> None:
        streams = config.hyper_connection_streams
        super().__init__(config, 2 * streams, 2, ctx, first_bias=equal_shares(streams), first_scale=small_scale)
        self.floor, self.magnitude = config.hyper_connection_epsilon, config.hyper_connection_magnitude

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, n H] -> the block's input [B, S, H], and post [B, S, n] in fp32"""
        shifts = self.bias.split(self.streams)
        parts = zip(self.products(streams).split(self.streams, -1), shifts, self.scale, strict=True)
        pre, post = ((part * scale + shift).sigmoid() for part, shift, scale in parts)
        return weighted_sum(pre + self.floor, streams), self.magnitude * post + self.floor


def added_to_streams(block_output: Tensor, post: Tensor, streams: Tensor) -> Tensor:
    """X + post (x) block_output, summed in fp32: [B, S, H], [B, S, n] and [B, S, n H] -> [B, S, n H]"""
    added = post.unsqueeze(-1) * block_output.float().unsqueeze(-2)
    return (streams.float() + added.flatten(-2)).to(streams.dtype)


def equal_shares(streams: int) -> Init:
    """Initial values by which the sum of the streams is their mean: sigmoid(bias) = 1 / n of the first n biases."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.zero_()
        tensor[:streams].fill_(-math.log(max(streams - 1, 1)))

    return fill


def small_scale(tensor: Tensor, generator: torch.Generator) -> None:
    """Initial values with which weights of streams hardly depend on the token."""
    tensor.fill_(0.01)
