"""What the layers of a model keep, grouped by how long they need it, and how many blocks fit the memory.

Each rank of a model has a scheduler, and all make the same decisions. The layers of pipeline stages differ in number
and kind, and ranks differ in free memory, so each rank counts blocks as the rank with the least room (`agree`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from mt_core.errors import ConfigError
from mt_core.nn.cache import KeepsState, PositionState, SequenceState
from mt_core.nn.model import as_generator
from mt_core.parallel.context import Axis
from mt_infer.quantization.groups import FORMATS


@dataclass(frozen=True)
class CacheGroup:
    """Layers that need the same positions: all of them, or those of a window. They share tables of blocks.

    format: inference.cache_dtype. bytes_per_position: of the rank of the model that keeps most.
    """

    window: int | None
    layers: tuple[KeepsState, ...]
    states: tuple[PositionState, ...]
    format: str
    bytes_per_position: int


@dataclass(frozen=True)
class CacheLayout:
    """Everything that the layers of this rank keep. bytes_per_sequence: of recurrent states, of the rank of the model
    that keeps most; 0 where no rank has some. undivided_token: an id of prompts with images, a run of which is computed
    in one pass, since its positions see one another; None without such a model."""

    groups: tuple[CacheGroup, ...]
    recurrent: tuple[tuple[KeepsState, SequenceState], ...]
    bytes_per_sequence: int
    undivided_token: int | None = None


def cache_layout(model: nn.Module, format: str = "auto") -> CacheLayout:
    """What the layers of a model declare. format: of what is kept of positions."""
    states = [(layer, layer.cached_state()) for layer in as_generator(model).cached_layers()]
    positions = [(module, state) for module, state in states if isinstance(state, PositionState)]
    groups = tuple(
        _group(window, [position for position in positions if position[1].window == window], format)
        for window in widest_first(state.window for _, state in positions)
    )
    recurrent = tuple((module, state) for module, state in states if isinstance(state, SequenceState))
    size = sum(math.prod(shape) * dtype.itemsize for _, state in recurrent for shape, dtype in state.tensors)
    return CacheLayout(groups, recurrent, size, getattr(model, "undivided_token", None))


def _group(window: int | None, layers: Sequence[tuple[KeepsState, PositionState]], format: str) -> CacheGroup:
    states = tuple(state for _, state in layers)
    size = sum(bytes_of_position(format, shape, state.dtype) for state in states for shape in state.shapes)
    return CacheGroup(window, tuple(layer for layer, _ in layers), states, format, size)


def bytes_of_position(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of one position's tensor in the cache. name: inference.cache_dtype."""
    if name == "auto":
        return math.prod(shape) * dtype.itemsize
    # The stored numbers, and an fp32 scale for each vector.
    return math.prod(shape) * FORMATS[name].bits // 8 + math.prod(shape[:-1]) * torch.float32.itemsize


def widest_first(windows: Iterable[int | None]) -> list[int | None]:
    # None, for all positions, counts as infinite. The order is the same on all ranks, whose groups are matched by it.
    return sorted(set(windows), key=lambda window: window or math.inf, reverse=True)


SNAPSHOTS = 64
"""Recurrent states that are kept at the ends of prefixes, where there is memory."""


@dataclass(frozen=True)
class CacheLimits:
    """memory: bytes. max_model_len: positions of a sequence. max_num_batched_tokens: new positions of all sequences in
    a forward pass. unread: how far behind a window positions are kept nevertheless. snapshots: recurrent states that
    are kept at the ends of prefixes at most.
    """

    memory: int
    block_size: int
    max_requests: int
    max_model_len: int
    max_num_batched_tokens: int
    unread: int = 0
    snapshots: int = SNAPSHOTS

    @property
    def slots(self) -> int:
        """Recurrent states in memory: of each request, and a spare one for the rows that fill a batch."""
        return self.max_requests + 1


@dataclass(frozen=True)
class CacheSizes:
    """blocks: of each group. snapshots: of recurrent states."""

    blocks: tuple[int, ...]
    snapshots: int


def split_memory(limits: CacheLimits, layouts: Sequence[CacheLayout]) -> list[CacheLimits]:
    """The limits of caches that share the memory, each with as much of it as of what all need at least.

    Raises ConfigError when the memory does not hold one sequence of the longest length in each.
    """
    # In proportion to the smallest possible caches, so that both hold about the same number of positions.
    needs = [least_bytes(layout, limits) for layout in layouts]
    _require_room(limits, sum(needs))
    return [replace(limits, memory=limits.memory * need // max(sum(needs), 1)) for need in needs]


def sizes_within(layout: CacheLayout, limits: CacheLimits) -> CacheSizes:
    """What fits the memory, and is not above what all requests together can use.

    Raises ConfigError when the memory does not hold one sequence of the longest length.
    """
    needed = least_bytes(layout, limits)
    _require_room(limits, needed)
    longest = [_blocks_of_longest(group, limits) for group in layout.groups]
    # Beyond the first sequence, up to max_requests of the longest length: more blocks could never be used.
    more = [(limits.max_requests - 1) * count for count in longest]
    # All groups, and the snapshots, get the same share of what they could use beyond one sequence.
    wanted = _bytes_of(more, layout, limits) + limits.snapshots * layout.bytes_per_sequence
    # Example: max_model_len=4096, block_size=16 and max_requests=4 give 256 blocks at least and 768 more at most;
    # memory for half of these gives 256 + 384.
    share = min((limits.memory - needed) / wanted, 1.0) if wanted else 1.0
    blocks = tuple(least + int(count * share) for least, count in zip(longest, more, strict=True))
    return CacheSizes(blocks, int(limits.snapshots * share))


def least_bytes(layout: CacheLayout, limits: CacheLimits) -> int:
    """Memory of one sequence of the longest length, and of the recurrent states of all requests."""
    longest = [_blocks_of_longest(group, limits) for group in layout.groups]
    return limits.slots * layout.bytes_per_sequence + _bytes_of(longest, layout, limits)


def _bytes_of(blocks: Sequence[int], layout: CacheLayout, limits: CacheLimits) -> int:
    sizes = (limits.block_size * group.bytes_per_position for group in layout.groups)
    return sum(count * size for count, size in zip(blocks, sizes, strict=True))


def _require_room(limits: CacheLimits, needed: int) -> None:
    if needed > limits.memory:
        raise ConfigError(
            f"inference.cache_memory_gb={limits.memory / 2**30:.3g} does not hold one sequence of "
            f"inference.max_sequence_length={limits.max_model_len} positions, which takes {needed / 2**30:.3g} GiB "
            f"(with the states of inference.max_requests={limits.max_requests} sequences); give more memory, or "
            "shorter sequences"
        )


def _blocks_of_longest(group: CacheGroup, limits: CacheLimits) -> int:
    return blocks_of_sequence(group, limits, limits.max_model_len)


def blocks_of_sequence(group: CacheGroup, limits: CacheLimits, positions: int) -> int:
    """Blocks that a sequence of so many positions uses at a time."""
    if group.window is not None:
        # While a chunk is computed: the window before it, what batch invariance reads behind that, the chunk itself (at
        # most a whole step), and a part of a block at the beginning of the window.
        positions = min(positions, group.window + limits.unread + limits.max_num_batched_tokens + limits.block_size)
    return -(-positions // limits.block_size)


@dataclass(frozen=True)
class _Needs:
    """What a rank needs and has. positions: bytes of a position in each group, by its window. sequence: bytes of the
    recurrent states of a sequence. memory: bytes in all."""

    positions: dict[int | None, int]
    sequence: int
    memory: int


def agree(layout: CacheLayout, limits: CacheLimits, axis: Axis) -> tuple[CacheLayout, CacheLimits]:
    """Collective over the axis, the ranks of one model. The layout has the groups of all ranks, some without layers."""
    # `axis` is "model": all ranks along tp and pp.
    if axis.size == 1:
        return layout, limits
    needs = _Needs(
        {group.window: group.bytes_per_position for group in layout.groups}, layout.bytes_per_sequence, limits.memory
    )
    gathered: list[_Needs | None] = [None] * axis.size
    # Example, pp=2: stage 0 has a group of full attention with 4 KiB a position, stage 1 one of full attention with 8
    # KiB and one of a window. Both count 8 KiB and the window's bytes, and have as many blocks of either; the tensors
    # of stage 0 take less.
    dist.all_gather_object(gathered, needs, group=axis.group)
    ranks = [rank for rank in gathered if rank is not None]
    groups = tuple(
        _agreed_group(window, layout, ranks) for window in widest_first(key for rank in ranks for key in rank.positions)
    )
    sequence = max(rank.sequence for rank in ranks)
    agreed = replace(layout, groups=groups, bytes_per_sequence=sequence)
    # The smallest memory: a rank with more of it leaves the difference unused.
    return agreed, replace(limits, memory=min(rank.memory for rank in ranks))


def _agreed_group(window: int | None, layout: CacheLayout, ranks: Sequence[_Needs]) -> CacheGroup:
    size = max(rank.positions.get(window, 0) for rank in ranks)
    groups = [group for group in layout.groups if group.window == window]
    # Without layers no tensors are allocated, but sequences have tables in the group: they run out of blocks, and are
    # preempted, at the same step as on the ranks that have the layers.
    return replace(groups[0], bytes_per_position=size) if groups else CacheGroup(window, (), (), "auto", size)
