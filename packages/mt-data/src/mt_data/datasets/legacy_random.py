"""NumPy's legacy shuffle (RandomState, MT19937), with the same result in less time for large arrays.

RandomState.shuffle swaps, for i = n-1 .. 1, element i with element j, where j is drawn evenly from 0..i: 32
random bits are cut to the bits of i and drawn again while the outcome is above i. One step after another
waits for memory and for mispredicted branches. Here many draws are taken and filtered at once, and the
swaps of a block of steps are done together. Steps of a block that meet (the same j twice, or a j inside
the block) are few while i is large, and are put right one by one. The last steps, whose elements fit into the
processor's cache, are left to NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMPY_STEPS = 1 << 20
"""The last steps, done by NumPy."""
# _DRAWS words are drawn at once (256 KB). A block of _BLOCK swaps of more than 2^20 elements has few swaps that meet:
# about 4096^2 / (2 * 2^20) = 8 share a target with an earlier one.
_DRAWS = 1 << 16
_BLOCK = 1 << 12


@dataclass(frozen=True)
class Swaps:
    """Steps i = top, top - 1, ...: swap element i with targets [steps] in turn."""

    top: int
    targets: NDArray[np.uint32]


@dataclass(frozen=True)
class Rest:
    """All remaining steps at once: element k becomes element permutation[k]."""

    permutation: NDArray[np.int64]


Steps = Iterator[Swaps | Rest]


class LegacyShuffler:
    """Shuffles as numpy.random.RandomState(seed) does, call after call."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed % 2**32)

    def shuffle(self, array: NDArray[Any]) -> None:
        """Shuffle a one-dimensional array of distinct values in place."""
        apply_steps(array, self.steps(len(array)))

    def steps(self, length: int) -> Steps:
        """The steps of a shuffle of `length` elements, to be taken to their end before the next shuffle's."""
        # Beyond 32 bits NumPy draws otherwise.
        # Elements below `alone` are shuffled by RandomState itself.
        alone = length if length > 1 << 32 else min(length, NUMPY_STEPS)
        top = length - 1
        while top >= alone:
            # One mask from `top` down to the power of two below it, where i loses a bit.
            for swaps in self._swaps_of_one_mask(top, max(alone, 1 << (top.bit_length() - 1))):
                yield swaps
                top -= len(swaps.targets)
        # Shuffling an identity and applying it to the elements equals shuffling these: swaps depend on places alone.
        permutation = np.arange(alone)
        self._state.shuffle(permutation)
        yield Rest(permutation)

    def _swaps_of_one_mask(self, top: int, bottom: int) -> Iterator[Swaps]:
        """Steps from `top` to `bottom`, numbers of equally many bits."""
        mask = np.uint32((1 << top.bit_length()) - 1)
        while top >= bottom:
            # Kept in case that more is drawn than this mask needs.
            before = self._state.get_state(legacy=False)
            draws = self._state.randint(0, 1 << 32, _DRAWS, dtype=np.uint32)
            draws &= mask
            # Both [accepted]: values, and where in `draws` each was.
            targets, places = _accepted(draws, top)
            wanted = top - bottom + 1
            # Also where they are exactly as many: rejected draws behind the last accepted one belong to the next mask.
            if len(targets) >= wanted:
                # Redraws exactly the words up to the last accepted one, which leaves the generator where RandomState
                # would be.
                self._state.set_state(before)
                self._state.randint(0, 1 << 32, int(places[wanted - 1]) + 1, dtype=np.uint32)
            yield Swaps(top, targets[:wanted])
            top -= len(targets)


def _accepted(draws: NDArray[np.uint32], top: int) -> tuple[NDArray[np.uint32], NDArray[np.intp]]:
    """The draws that are not above i, where i starts at `top` and falls with each of them, and their places."""
    # Places and `take`, since an index of booleans is slowed by mispredicted branches.
    places = np.flatnonzero(draws <= top)
    values = draws.take(places, mode="clip")
    # Another draw can only be above i where it is so with none of those before it turned down.
    # places has the draws <= top. The k-th accepted draw is compared with i = top - k (k counted among the accepted),
    # so value + k > top is a rejection. The position in `values` is an upper bound of k, hence only doubtful ones are
    # looked at.
    doubtful = np.flatnonzero(values + np.arange(len(values), dtype=np.uint32) > top)
    dropped: list[int] = []
    for place, value in zip(doubtful.tolist(), values[doubtful].tolist(), strict=True):
        # place - len(dropped) is k: each draw dropped before this one moved i by one less.
        if value + place - len(dropped) > top:
            dropped.append(place)
    return (np.delete(values, dropped), np.delete(places, dropped)) if dropped else (values, places)


def apply_steps(array: NDArray[Any], steps: Steps, advance: Callable[[int], None] = lambda count: None) -> None:
    """Do the steps on a one-dimensional array of distinct values; `advance` is called with how many were done."""
    for step in steps:
        if isinstance(step, Rest):
            # A view: the assignment below shuffles the beginning of `array` in place.
            head = array[: len(step.permutation)]
            head[:] = head[step.permutation]
            advance(len(head))
            return
        for start in range(0, len(step.targets), _BLOCK):
            _swap_block(array, step.top - start, step.targets[start : start + _BLOCK].astype(np.intp))
        advance(len(step.targets))


def _swap_block(array: NDArray[Any], top: int, targets: NDArray[np.intp]) -> None:
    """Swap element top - t with element targets[t], for t = 0, 1, ... in turn."""
    bottom = top - len(targets) + 1
    # A view of the elements top, top - 1, ... that this block of steps writes; `held` is in the order of the steps.
    block = array[bottom : top + 1]
    held = block[::-1].copy()  # what element top - t holds when its step comes
    taken = array.take(targets, mode="clip")  # what that step puts there
    # Steps whose partner is an element of the block: they change what a later step finds in its own place.
    inside = np.flatnonzero(targets >= bottom)
    taken_inside = []
    for step, target in zip(inside.tolist(), (top - targets[inside]).tolist(), strict=True):
        taken_inside.append(held[target])
        # Element top - target receives what element top - step held; a later step `target` reads it from there. A step
        # that draws itself (target == step) leaves it.
        held[target] = held[step]
    array[targets] = held  # of steps with one target, the last one stays
    # Steps that share a target with a later one. Values are distinct (the docstring's condition), so a difference shows
    # it.
    overwritten = np.flatnonzero(array.take(targets, mode="clip") != held)
    for target in set(targets[overwritten].tolist()):
        meeting = np.flatnonzero(targets == target)
        # The second step on a place takes what the first one put there, not what was there before the block.
        taken[meeting[1:]] = held[meeting[:-1]]
    taken[inside] = taken_inside
    block[:] = taken[::-1]
