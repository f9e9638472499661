"""The random numbers of C++'s standard Mersenne Twisters, and NumPy's legacy shuffle, in NumPy.

Megatron's C++ helper draws lengths from `std::mt19937` and shuffles with `std::mt19937_64`; the same
samples in the same order need the same numbers. The 64-bit recurrence follows Nishimura and Matsumoto,
"Tables of 64-bit Mersenne Twisters" (2000), whose constants the C++ standard takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SMALL = 1 << 14
"""Rows of which a shuffle is done one swap at a time."""
# mt19937_64: n = 312 words of state, m = 156, r = 31 bits in the lower mask, and the twist a.
_WORDS = 312
_HALF = 156
_LOWER = np.uint64((1 << 31) - 1)
_UPPER = ~_LOWER
_TWIST = np.uint64(0xB5026F5AA96619E9)
_ONE = np.uint64(1)
_MASK_64 = (1 << 64) - 1


class Mt19937:
    """`std::mt19937(seed)`: 32-bit numbers."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed & 0xFFFFFFFF)

    def draw(self, count: int) -> NDArray[np.uint32]:
        """The next numbers [count]."""
        # The full range of uint32: NumPy then returns the generator's words as they are, without rejection.
        return self._state.randint(0, 1 << 32, size=count, dtype=np.uint32)


class Mt1993764:
    """`std::mt19937_64(seed)`: 64-bit numbers, made 312 at a time."""

    def __init__(self, seed: int) -> None:
        self._words = _initial_words(seed)
        self._ready = np.zeros(0, np.uint64)

    def draw(self, count: int) -> NDArray[np.uint64]:
        """The next numbers [count]."""
        parts, missing = [self._ready], count - len(self._ready)
        while missing > 0:
            _twist(self._words)
            parts.append(self._words.copy())
            missing -= _WORDS
        numbers = np.concatenate(parts)
        # What was left over from an earlier call is tempered already.
        _temper(numbers[len(self._ready) :])
        # Words come 312 at a time; what one call does not take is the beginning of the next.
        self._ready = numbers[count:]
        return numbers[:count]


def shuffle_order(count: int, seed: int) -> NDArray[np.int64]:
    """[count]: where each row comes from when a Fisher-Yates shuffle with `std::mt19937_64(seed)` swaps row
    i = count - 1, ..., 1 with row (next number) modulo (i + 1).
    """
    random = Mt1993764(seed)
    order = np.arange(count, dtype=np.int64)
    scratch = np.zeros(count, np.int32)
    last = count - 1
    # With k swaps among n rows about k^2 / (2 n) pairs share a partner and k^2 / n partners are rows of the block: two
    # and four for k = 2 * sqrt(n), whatever n is. Only these are swapped in turn.
    while last >= _SMALL:
        # Of so many swaps about one in a thousand meets another, if the rows are many.
        rows = np.arange(last, last - 2 * isqrt(last), -1)
        _swap_many(order, rows, _partners(rows, random), scratch)
        last = int(rows[-1]) - 1
    rows = np.arange(last, 0, -1)
    head = order[: last + 1].tolist()
    _swap_in_turn(head, rows, _partners(rows, random))
    order[: last + 1] = head
    return order


def _partners(rows: NDArray[np.int64], random: Mt1993764) -> NDArray[np.int64]:
    # The remainder, not rejection: Megatron's C++ takes (next number) % (i + 1), with its slight bias.
    return (random.draw(len(rows)) % (rows + 1).astype(np.uint64)).astype(np.int64)


def _swap_many(
    order: NDArray[np.int64], rows: NDArray[np.int64], others: NDArray[np.int64], scratch: NDArray[np.int32]
) -> None:
    """Swap order[rows[t]] with order[others[t]] for t = 0, 1, ...; rows [n] fall by one, scratch is like order.

    Swaps that share no place with another one can be done in any order, hence all at once.
    """
    steps = np.arange(len(rows), dtype=np.int32)
    # Of equal `others` the last assignment stays, so all but the last read back another step: they share their partner.
    scratch[others] = steps
    shared = others[scratch[others] != steps]
    scratch[others] = 0
    # Partners that are rows of this block themselves; rows fall by one, so rows[-1] is the lowest.
    inside = others[others >= rows[-1]]
    scratch[shared] = 1
    scratch[inside] = 1
    # A swap meets another if either of its places is marked; all other swaps are independent and are done at once.
    meets = (scratch[others] | scratch[rows]) == 1
    # Only what was set is cleared; zeroing all of scratch would cost count operations a block.
    scratch[shared] = 0
    scratch[inside] = 0
    alone = ~meets
    a, b = rows[alone], others[alone]
    # Both right sides are copies (fancy indexing) before either is assigned.
    order[a], order[b] = order[b], order[a]
    _swap_in_turn(order, rows[meets], others[meets])


def _swap_in_turn(
    order: MutableSequence[int] | NDArray[np.int64], rows: NDArray[np.int64], others: NDArray[np.int64]
) -> None:
    for row, other in zip(rows.tolist(), others.tolist(), strict=True):
        order[row], order[other] = order[other], order[row]


def _initial_words(seed: int) -> NDArray[np.uint64]:
    words = [seed & _MASK_64]
    for i in range(1, _WORDS):
        # [rand.eng.mers] of the C++ standard: x_i = f * (x_(i-1) xor (x_(i-1) >> (w - 2))) + i mod 2^w, with w = 64.
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) & _MASK_64)
    return np.array(words, np.uint64)


def _twist(words: NDArray[np.uint64]) -> None:
    """Advance the state [312] in place.

    Word i needs word i + 156 (modulo 312), so each half can be made at once from the other half.
    """
    # Word 155 takes its low bits from word 156, which is still the old one; so must word 311 from word 0, already new,
    # as in the loop of the paper.
    words[:_HALF] = words[_HALF:] ^ _mix(words[:_HALF], words[1 : _HALF + 1])
    words[_HALF:-1] = words[: _HALF - 1] ^ _mix(words[_HALF:-1], words[_HALF + 1 :])
    words[-1:] = words[_HALF - 1 : _HALF] ^ _mix(words[-1:], words[:1])


def _mix(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.uint64]:
    joined = (high & _UPPER) | (low & _LOWER)
    return (joined >> _ONE) ^ ((joined & _ONE) * _TWIST)


def _temper(words: NDArray[np.uint64]) -> None:
    # Tempering: u = 29 with d, s = 17 with b, t = 37 with c, l = 43.
    words ^= (words >> np.uint64(29)) & np.uint64(0x5555555555555555)
    words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    words ^= words >> np.uint64(43)


# -- NumPy's legacy shuffle (RandomState, MT19937), faster for large arrays --------------------------
#
# RandomState.shuffle swaps, for i = n-1 .. 1, element i with element j, where j is drawn evenly from 0..i: 32
# random bits are cut to the bits of i and drawn again while the outcome is above i. One step after another
# waits for memory and for mispredicted branches. Here many draws are taken and filtered at once, and the
# swaps of a block of steps are done together. Steps of a block that meet (the same j twice, or a j inside
# the block) are few while i is large, and are put right one by one. The last steps, whose elements fit into the
# processor's cache, are left to NumPy.

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
