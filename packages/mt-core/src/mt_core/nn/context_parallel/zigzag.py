"""Zig-zag sharding of a sequence over context-parallel ranks: two chunks each, one early and one late.

A sequence of S tokens is cut into 2 * CP chunks of c = S / (2 * CP) tokens, and rank r holds chunks r and
2 * CP - 1 - r, in this order:

    CP = 4    chunk   0  1  2  3  4  5  6  7
              rank    0  1  2  3  3  2  1  0

Under a causal mask a token's work grows with its position; an early and a late chunk together cost every rank
the same. Names below: `size` is CP, `rank` a place on the axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.collectives import gather_copies
from mt_core.parallel.context import Axis


def check_sequence_length(length: int, size: int) -> None:
    """Raises ConfigError, with the nearest legal lengths, unless 2 * size chunks of equal length fit."""
    unit = 2 * size
    if size == 1 or (length > 0 and length % unit == 0):
        return
    below = length - length % unit
    near = f"{below} or {below + unit}" if below else str(unit)
    raise ConfigError(
        f"data.seq_length={length} cannot be cut into the 2 x {size} equal chunks that "
        f"parallel.context_parallel_size={size} needs; the nearest legal values of data.seq_length are {near}"
    )


def shard_sequence(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's tokens of the whole sequence: [..., S, ...] -> [..., S / CP, ...], contiguous.

    For anything that has a value per token: tokens, labels, loss mask, segment ids, position ids. Sharding the
    position ids is what makes learned and rotary positions right. No communication. Raises ConfigError.
    """
    if axis.size == 1:
        return x
    check_sequence_length(x.shape[dim], axis.size)
    chunks = x.chunk(2 * axis.size, dim)
    # cat copies: the whole sequence can be freed, and kernels get contiguous tokens.
    return torch.cat([chunks[axis.rank], chunks[2 * axis.size - 1 - axis.rank]], dim)


def unshard_sequence(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """The whole sequence on every rank, the inverse of shard_sequence: [..., S / CP, ...] -> [..., S, ...].

    Collective. For work that all ranks repeat alike: its gradient is cut, not summed.
    """
    return in_order(gather_copies(x, dim % x.dim(), axis), dim, axis.size) if axis.size > 1 else x


def in_order(x: Tensor, dim: int, size: int) -> Tensor:
    """The shards of ranks 0, 1, ... end to end along `dim` -> their tokens in the sequence's order."""
    start = dim % x.dim()
    early, late = x.unflatten(start, (size, 2, -1)).unbind(start + 1)  # each [..., rank, token of the chunk, ...]
    # Late chunks are in the opposite order of the ranks that hold them.
    return torch.cat([early, late.flip(start)], start).flatten(start, start + 1)


def as_shards(x: Tensor, dim: int, size: int) -> Tensor:
    """Tokens in the sequence's order -> the shards of ranks 0, 1, ... end to end; the inverse of in_order."""
    # size 2: chunks 0 1 2 3 -> 0 3 | 1 2
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunk for rank in range(size) for chunk in (chunks[rank], chunks[2 * size - 1 - rank])], dim)


def shard_positions(rank: int, size: int, chunk: int, device: torch.device) -> Tensor:
    """[2 * chunk]: where the tokens of a rank stand in the whole sequence."""
    # rank 1 of 4, chunk 10: positions 10 to 19 and 60 to 69.
    late = 2 * size - 1 - rank
    starts = torch.tensor([[rank * chunk], [late * chunk]], device=device)
    return (starts + torch.arange(chunk, device=device)).flatten()


def visible_rows(source: int, reader: int, chunk: int, causal: bool) -> tuple[slice, slice]:
    """(rows of the reader's queries, rows of the source's keys) of the block in which the one sees the other.

    Between two ranks a causal mask leaves one full rectangle. A source before the reader shows its early chunk
    to all queries, and its late chunk to none. A source after the reader shows both chunks to the late queries.

        source < reader     early late         source > reader     early late
        early query           x    .           early query           .    .
        late query            x    .           late query            x    x
    """
    everything = slice(0, 2 * chunk)
    if not causal:
        return everything, everything
    return (everything, slice(0, chunk)) if source < reader else (slice(chunk, 2 * chunk), everything)
