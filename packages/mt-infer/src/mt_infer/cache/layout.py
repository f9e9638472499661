"""What the layers of a model keep, grouped by how long they need it, and how many blocks fit the memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from mt_core.errors import ConfigError
from mt_core.nn.cache import KeepsState, PositionState, SequenceState
from mt_core.nn.model import as_generator
from mt_infer.cache.formats import bytes_of


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
    that keeps most; 0 where no rank has some."""

    groups: tuple[CacheGroup, ...]
    recurrent: tuple[tuple[KeepsState, SequenceState], ...]
    bytes_per_sequence: int


def cache_layout(model: nn.Module, format: str = "auto") -> CacheLayout:
    """What the layers of a model declare. format: of what is kept of positions."""
    states = [(layer, layer.cached_state()) for layer in as_generator(model).cached_layers()]
    positions = [(module, state) for module, state in states if isinstance(state, PositionState)]
    groups = tuple(
        _group(window, [one for one in positions if one[1].window == window], format)
        for window in widest_first(state.window for _, state in positions)
    )
    recurrent = tuple((module, state) for module, state in states if isinstance(state, SequenceState))
    size = sum(math.prod(shape) * dtype.itemsize for _, state in recurrent for shape, dtype in state.tensors)
    return CacheLayout(groups, recurrent, size)


def _group(window: int | None, layers: Sequence[tuple[KeepsState, PositionState]], format: str) -> CacheGroup:
    states = tuple(state for _, state in layers)
    size = sum(bytes_of(format, shape, state.dtype) for state in states for shape in state.shapes)
    return CacheGroup(window, tuple(layer for layer, _ in layers), states, format, size)


def widest_first(windows: Iterable[int | None]) -> list[int | None]:
    return sorted(set(windows), key=lambda window: window or math.inf, reverse=True)


@dataclass(frozen=True)
class CacheLimits:
    """memory: bytes. longest: positions of a sequence. step: new positions of all sequences in a forward
    pass. unread: how far behind a window positions are kept nevertheless.
    """

    memory: int
    block_size: int
    max_requests: int
    longest: int
    step: int
    unread: int = 0

    @property
    def slots(self) -> int:
        """Recurrent states in memory: of each request, and a spare one for the rows that fill a batch."""
        return self.max_requests + 1


def blocks_of_groups(layout: CacheLayout, limits: CacheLimits) -> tuple[int, ...]:
    """The number of blocks of each group, within the memory and not above what all requests together can use.

    Raises ConfigError when the memory does not hold one sequence of the longest length.
    """
    most = tuple(limits.max_requests * _blocks_of_longest(group, limits) for group in layout.groups)
    room = limits.memory - limits.slots * layout.bytes_per_sequence
    needed = sum(
        _blocks_of_longest(group, limits) * limits.block_size * group.bytes_per_position for group in layout.groups
    )
    if needed > room:
        fixed = limits.slots * layout.bytes_per_sequence
        raise ConfigError(
            f"inference.cache_memory_gb={limits.memory / 2**30:.3g} does not hold one sequence of "
            f"inference.max_sequence_length={limits.longest} positions, which takes {(needed + fixed) / 2**30:.3g} GiB "
            f"(with the states of inference.max_requests={limits.max_requests} sequences); give more memory, or "
            "shorter sequences"
        )
    # All groups get the same share of what all requests together could use.
    wanted = sum(
        count * limits.block_size * group.bytes_per_position for count, group in zip(most, layout.groups, strict=True)
    )
    share = min(room / wanted, 1.0) if wanted else 1.0
    return tuple(
        max(int(count * share), _blocks_of_longest(group, limits))
        for count, group in zip(most, layout.groups, strict=True)
    )


def _blocks_of_longest(group: CacheGroup, limits: CacheLimits) -> int:
    return blocks_of_sequence(group, limits, limits.longest)


def blocks_of_sequence(group: CacheGroup, limits: CacheLimits, longest: int) -> int:
    """Blocks that a sequence of so many positions uses at a time."""
    if group.window is not None:
        longest = min(longest, group.window + limits.unread + limits.step + limits.block_size)
    return -(-longest // limits.block_size)
