"""Launches of the kernels of `chunk_states`, which a recurrence with a matrix as state has in common with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mt_models.blocks.triton_kernels.chunk_states import (
    _keys_of_chunks_backward,
    _outputs_of_chunks,
    _pairs_of_chunks_backward,
    _states_of_chunks,
    _states_of_chunks_backward,
)

WIDEST_KEY = 128
"""Channels of a key: a program of the states holds all of them."""
CHUNK_SIZES = (32, 64)
"""Positions of a chunk."""
BLOCK_VALUE = 64
"""Channels of a value at a time, but for the states between chunks."""
STATE_VALUES = 32
"""Channels of a value that a program of the states computes: it holds [D, STATE_VALUES] from chunk to chunk."""
BLOCK_KEY = 64
"""Channels of a key at a time in the gradients of what keys are part of."""


@dataclass(frozen=True)
class ChunkShape:
    """Sizes of one call."""

    rows: int
    length: int
    heads: int
    dim: int
    value: int
    size: int
    """Positions of a chunk."""

    @property
    def sequences(self) -> int:
        return self.rows * self.heads

    @property
    def chunks(self) -> int:
        """Chunks of a sequence."""
        return -(-self.length // self.size)

    @property
    def programs(self) -> int:
        return self.sequences * self.chunks

    @property
    def block_dim(self) -> int:
        """Channels of a key, filled to a power of two, of which tl.dot takes 16 at least."""
        return max(int(triton.next_power_of_2(self.dim)), 16)

    @property
    def all_values(self) -> int:
        """Channels of a value, filled to whole blocks."""
        return -(-self.value // BLOCK_VALUE) * BLOCK_VALUE

    @property
    def block_key(self) -> int:
        return min(self.block_dim, BLOCK_KEY)

    def pairs(self, like: Tensor) -> Tensor:
        """[N, K, L, L] in the dtype of `like`, not initialized; so are the others."""
        return like.new_empty(self.sequences, self.chunks, self.size, self.size)

    def keys(self, like: Tensor) -> Tensor:
        """[N, K, L, D]"""
        return like.new_empty(self.sequences, self.chunks, self.size, self.block_dim)

    def values(self, like: Tensor) -> Tensor:
        """[N, K, L, V]"""
        return like.new_empty(self.sequences, self.chunks, self.size, self.all_values)

    def states(self, like: Tensor) -> Tensor:
        """[N, K, D, V]"""
        return like.new_empty(self.sequences, self.chunks, self.block_dim, self.all_values)

    def decays(self, like: Tensor) -> Tensor:
        """[N, K, D] in fp32"""
        return like.new_empty(self.sequences, self.chunks, self.block_dim, dtype=torch.float32)

    def state(self, like: Tensor) -> Tensor:
        """[B, H, D, V] in fp32, without what is filled"""
        return like.new_empty(self.rows, self.heads, self.dim, self.value, dtype=torch.float32)


class ChunkParts(NamedTuple):
    """P, Q, K, W, U and d of `chunk_states`."""

    scores: Tensor
    read: Tensor
    written: Tensor
    removed: Tensor
    updates: Tensor
    over: Tensor


class ChunkGradients(NamedTuple):
    """What `_pairs_of_chunks_backward` and `_keys_of_chunks_backward` write."""

    scores: Tensor
    system: Tensor
    read: Tensor
    written: Tensor
    looked: Tensor
    over: Tensor
    v: Tensor
    beta: Tensor
    state: Tensor


def precision_of(x: Tensor) -> str:
    """The `input_precision` of `tl.dot` for operands of this dtype. fp32: each is split into TF32 terms, whose products
    are summed (tf32x3). 16-bit dtypes: TF32 holds them exactly."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of rows, positions and heads of each [B, S, H, C]."""
    strides: list[int] = []
    for x in tensors:
        strides += x.stride()[:3]
    return tuple(strides)


def states_of_chunks(shape: ChunkShape, parts: ChunkParts, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """States before all chunks, and behind the last; the updates of `parts` become u."""
    before, last = shape.states(parts.updates), shape.state(parts.updates)
    _states_of_chunks[(shape.sequences, shape.all_values // STATE_VALUES)](
        parts.removed, parts.written, parts.updates, parts.over, last if state is None else state, before, last,
        shape.chunks, state is not None, shape.dim, shape.value, shape.block_dim, shape.all_values, shape.size,
        STATE_VALUES, precision_of(before), num_warps=4, num_stages=2,
    )  # fmt: skip
    return before, last


def outputs_of_chunks(shape: ChunkShape, parts: ChunkParts, before: Tensor, like: Tensor) -> Tensor:
    """[B, S, H, V] in the dtype of `like`"""
    o = like.new_empty(shape.rows, shape.length, shape.heads, shape.value)
    _outputs_of_chunks[(shape.programs, shape.all_values // BLOCK_VALUE)](
        parts.scores, parts.read, parts.updates, before, o, shape.length, shape.heads, shape.chunks,
        shape.value, shape.block_dim, shape.all_values, shape.size, BLOCK_VALUE, precision_of(before),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return o


def gradients_of_chunks(
    shape: ChunkShape, parts: ChunkParts, before: Tensor, inverse: Tensor, v: Tensor, beta: Tensor, do: Tensor,
    dlast: Tensor | None,
) -> ChunkGradients:  # fmt: skip
    """parts with u; do [B, S, H, V], contiguous, in the dtype of the parts; dlast [B, H, D, V] in fp32."""
    precision = precision_of(before)
    dupdates, dbehind, dstate = torch.empty_like(parts.updates), torch.empty_like(before), shape.state(before)
    _states_of_chunks_backward[(shape.sequences, shape.all_values // STATE_VALUES)](
        parts.scores, parts.read, parts.written, parts.removed, parts.over, do, dstate if dlast is None else dlast,
        dupdates, dbehind, dstate, shape.length, shape.heads, shape.chunks, dlast is not None, shape.dim, shape.value,
        shape.block_dim, shape.all_values, shape.size, STATE_VALUES, precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    dscores, dsystem, dv = shape.pairs(before), shape.pairs(before), v.new_empty(do.shape)
    dbeta = torch.empty_like(beta, dtype=torch.float32)
    _pairs_of_chunks_backward[(shape.programs,)](
        inverse, parts.updates, v, beta, do, dupdates, dscores, dsystem, dv, dbeta, shape.length, shape.heads,
        shape.chunks, *strides_of(v), shape.value, shape.all_values, shape.size, BLOCK_VALUE, precision,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    dread, dwritten, looked = shape.keys(before), shape.keys(before), shape.keys(before)
    dover = torch.empty_like(parts.over)
    _keys_of_chunks_backward[(shape.programs, shape.block_dim // shape.block_key)](
        parts.updates, before, do, dupdates, dbehind, dread, dwritten, looked, dover, shape.length, shape.heads,
        shape.chunks, shape.value, shape.block_dim, shape.all_values, shape.size, shape.block_key, BLOCK_VALUE,
        precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    return ChunkGradients(dscores, dsystem, dread, dwritten, looked, dover, dv, dbeta, dstate)


def numbered_documents(segment_ids: Tensor | None) -> Tensor | None:
    """[B, S] int32: documents by numbers that count up, so that equal numbers are one document."""
    if segment_ids is None:
        return None
    begins = torch.zeros_like(segment_ids, dtype=torch.int32)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return begins.cumsum(1, dtype=torch.int32)


def contiguous_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
