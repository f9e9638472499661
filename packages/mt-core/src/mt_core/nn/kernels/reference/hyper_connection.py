"""Reference of hyper-connections (DeepSeek, mHC, 2026) in plain torch, behind the product of streams and weight.

Shapes: B batch, S positions, n streams of H channels, those of a token side by side.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Connection(NamedTuple):
    """Constants of a connection: epsilon of the norm, floor of weights and of Sinkhorn's sums, its iterations.

    added_to_root: epsilon is added to the root mean square, as Megatron-Core does, and not to the mean of squares.
    """

    epsilon: float
    floor: float
    iterations: int
    added_to_root: bool = False


def read_streams(
    streams: Tensor, products: Tensor, bias: Tensor, scale: Tensor, connection: Connection
) -> tuple[Tensor, Tensor, Tensor]:
    """streams X [B, S, n H], products W vec(X) [B, S, (2 + n) n] in fp32, bias [(2 + n) n], scale [3] -> the block's
    input [B, S, H], post [B, S, n] and C [B, S, n, n] in fp32: see mt_models.blocks.hyper_connection."""
    n = int(products.shape[-1] ** 0.5)  # n^2 < (2 + n) n < (n + 1)^2
    sizes = (n, n, n * n)
    # The norm has no weight: dividing the products by rms gives the same as dividing what is multiplied.
    norm = normalized_by_root if connection.added_to_root else normalized
    parts = zip(norm(products, streams, connection.epsilon).split(sizes, -1), bias.split(sizes), strict=True)
    pre, post, mixed = (part * factor + shift for (part, shift), factor in zip(parts, scale, strict=True))
    block_input = weighted_sum(pre.sigmoid() + connection.floor, streams)
    positive = mixed.unflatten(-1, (n, n)).softmax(-1) + connection.floor
    return block_input, 2.0 * post.sigmoid(), sinkhorn(positive, connection.iterations, connection.floor)


def normalized(products: Tensor, streams: Tensor, epsilon: float) -> Tensor:
    """products [B, S, outputs] of streams [B, S, n H], divided by their root mean square."""
    return products * (streams.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()


def normalized_by_root(products: Tensor, streams: Tensor, epsilon: float) -> Tensor:
    """The same with epsilon added to the root mean square."""
    width = streams.shape[-1]
    return products / (streams.float().norm(dim=-1, keepdim=True) / width**0.5 + epsilon)


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
