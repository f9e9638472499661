"""The arrays of `gpt_index`, built by loops that numba compiles: the same arrays, in a fraction of the time.

The shuffle is NumPy's legacy one (RandomState, MT19937; Matsumoto and Nishimura 1998), bit for bit. What makes it
quick is that the targets of some thousand swaps are drawn first, without a branch that could be mispredicted; the
swaps then wait for memory together instead of one after another.

Importing this module imports numba (`pip install "mt-data[fast]"`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.gpt_index import GPTIndex, GPTIndexPlan, Progress, shuffle_index

MAX_DOCUMENTS = 1 << 32
"""Documents times epochs. Beyond 32 bits NumPy draws otherwise."""
_STEPS = 1 << 20
"""Steps between two reports of progress."""
_DRAWN = 1 << 14
"""Targets drawn ahead: 64 kB, which stay in the processor's cache."""
# MT19937: n = 624 words of state, m = 397, mask of the upper bit (w - r = 1), of the lower 31 bits, and the twist a.
_WORDS, _SHIFT = 624, 397
_UPPER, _LOWER, _TWIST = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
_LENGTH_BITS = np.uint64(31)
_LENGTH_MASK = np.uint64((1 << 31) - 1)
_INT32_MAX = np.iinfo(np.int32).max


def build_compiled_index(
    elements: range, sequence_lengths: NDArray[np.int32], plan: GPTIndexPlan, progress: Progress | None = None
) -> GPTIndex:
    """The index of `gpt_index.build_gpt_index`. Takes 16 bytes a document and epoch at most, and its arrays."""
    count = len(elements) * plan.epochs
    if count > MAX_DOCUMENTS:
        raise DataError(
            f"{plan.epochs} epochs of {len(elements)} documents are more than {MAX_DOCUMENTS}, which "
            'data.index_engine="numba" can shuffle; set "numpy"'
        )
    random = CompiledShuffler(plan.seed)
    done = 0

    def advance(steps: int) -> None:
        nonlocal done
        done += steps
        if progress is not None:
            progress(done, 2 * count)

    packed = np.empty(count, np.uint64)
    # 33 bits are left for the document, which is below 2^31 as document_index is int32.
    _pack(sequence_lengths[elements.start : elements.stop], elements.start, packed)
    apart = plan.samples_before_final_epoch is not None
    # The same order of shuffles from one generator as in gpt_index.build_gpt_index.
    for part in [packed[: -len(elements)], packed[-len(elements) :]] if apart else [packed]:
        random.shuffle(part, advance)
    longest = int(sequence_lengths[elements.start : elements.stop].max(initial=0))
    dtype = np.int64 if max(count, longest) > _INT32_MAX else np.int32
    document_index = np.empty(count, np.int32)
    sample_index = np.zeros((plan.samples + 1, 2), dtype)
    _walk(packed, plan.sequence_length, plan.extra, document_index, sample_index)
    advance(count)
    return GPTIndex(document_index, sample_index, shuffle_index(plan, random))


class CompiledShuffler:
    """Shuffles as numpy.random.RandomState(seed) does, call after call."""

    def __init__(self, seed: int) -> None:
        state: Any = np.random.RandomState(seed % 2**32).get_state(legacy=False)
        # RandomState does the seeding, so only the recurrence is written here.
        self._key: NDArray[np.uint32] = state["state"]["key"].astype(np.uint32)
        # [624] words to be taken from `place` on; those of the key that RandomState starts with are all spent.
        self._words = np.empty(_WORDS, np.uint32)
        self._place = np.array([state["state"]["pos"]])
        self._targets = np.empty(_DRAWN, np.uint32)

    def shuffle(self, array: NDArray[Any], advance: Callable[[int], None] = lambda count: None) -> None:
        """Shuffle a one-dimensional array of at most 2^32 elements in place; `advance` is called with counts."""
        top = len(array) - 1
        while top > 0:
            steps = min(top, _STEPS)
            _shuffle_steps(array, top, steps, self._key, self._words, self._place, self._targets)
            advance(steps)
            top -= steps
        # n elements take n - 1 steps; one more is reported, so that all parts add up to the count of elements.
        advance(min(len(array), 1))


def _compiled(function: Any) -> Any:
    """Compiled at the first call; kept on the disk for later processes, where there is a place for it."""
    try:
        # nogil: the progress bar's thread goes on drawing meanwhile.
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(nogil=True)(function)


@_compiled
def _pack(lengths: NDArray[np.int32], first: int, packed: NDArray[np.uint64]) -> None:
    """Document times 2^31, plus its length, for each document of each epoch, so that a shuffle moves both at once."""
    for begin in range(0, len(packed), len(lengths)):
        for k in range(len(lengths)):
            packed[begin + k] = (np.uint64(first + k) << _LENGTH_BITS) | np.uint64(lengths[k])


@_compiled
def _twisted(high: np.uint32, low: np.uint32) -> np.uint32:
    joined = (high & _UPPER) | (low & _LOWER)
    return (joined >> np.uint32(1)) ^ ((joined & np.uint32(1)) * _TWIST)


@_compiled
def _next_words(key: NDArray[np.uint32], words: NDArray[np.uint32]) -> None:
    """The next 624 words of MT19937."""
    for k in range(_WORDS - _SHIFT):
        key[k] = key[k + _SHIFT] ^ _twisted(key[k], key[k + 1])
    for k in range(_WORDS - _SHIFT, _WORDS - 1):
        key[k] = key[k + _SHIFT - _WORDS] ^ _twisted(key[k], key[k + 1])
    key[_WORDS - 1] = key[_SHIFT - 1] ^ _twisted(key[_WORDS - 1], key[0])
    for k in range(_WORDS):
        word = key[k]
        # Tempering, with the shifts and masks of MT19937.
        word ^= word >> np.uint32(11)
        word ^= (word << np.uint32(7)) & np.uint32(0x9D2C5680)
        word ^= (word << np.uint32(15)) & np.uint32(0xEFC60000)
        words[k] = word ^ (word >> np.uint32(18))


@_compiled
def _draw(
    top: int,
    steps: int,
    key: NDArray[np.uint32],
    words: NDArray[np.uint32],
    place: NDArray[np.int64],
    targets: NDArray[np.uint32],
) -> None:
    """targets [steps]: an even draw from 0..i for each of i = top, top - 1, ..., which a word above i misses."""
    drawn: Any = 0
    while drawn < steps:
        half = 1  # the largest power of 2 that is not above i
        while half << 1 <= top - drawn:
            half <<= 1
        # The smallest mask of ones that covers i, as random_interval of NumPy's legacy generator takes it.
        mask = np.uint32(2 * half - 1)
        # Draws until i falls below `half`, where the mask loses a bit.
        same_mask = min(steps, top - half + 1)
        while drawn < same_mask:
            if place[0] == _WORDS:
                _next_words(key, words)
                place[0] = 0
            first = place[0]
            # No more words than draws are missing, so none is taken from the generator that belongs to the next mask.
            last = min(_WORDS, first + same_mask - drawn)
            for k in range(first, last):
                value = words[k] & mask
                targets[drawn] = value
                # Rejection without a branch: a value above i is written to the same place again by the next word.
                drawn += np.int64(value) <= top - drawn
            place[0] = last


@_compiled
def _shuffle_steps(
    array: NDArray[Any],
    top: int,
    steps: int,
    key: NDArray[np.uint32],
    words: NDArray[np.uint32],
    place: NDArray[np.int64],
    targets: NDArray[np.uint32],
) -> None:
    """Swap element i with one of 0..i, for i = top, top - 1, ..., `steps` times."""
    while steps > 0:
        block = min(steps, len(targets))
        _draw(top, block, key, words, place, targets)
        for k in range(block):
            target = targets[k]
            # Neighbouring swaps do not wait for each other's memory unless they meet; the processor overlaps their
            # loads.
            held = array[top - k]
            array[top - k] = array[target]
            array[target] = held
        top -= block
        steps -= block


@_compiled
def _walk(
    packed: NDArray[np.uint64],
    sequence_length: int,
    extra: int,
    document_index: NDArray[np.int32],
    sample_index: NDArray[np.integer],
) -> None:
    """Sample k ends with token k * sequence_length + extra - 1 of the stream (from 0), and the next one starts
    `extra` tokens before that end; one that the tokens do not fill ends with the last document.
    """
    rows = len(sample_index)
    end: Any = 0
    row, wanted = 1, sequence_length + extra
    for place in range(len(packed)):
        document_index[place] = packed[place] >> _LENGTH_BITS
        start = end
        end += np.int64(packed[place] & _LENGTH_MASK)
        # A loop: a document longer than sequence_length ends several samples.
        while end >= wanted and row < rows:
            sample_index[row, 0] = place
            sample_index[row, 1] = wanted - extra - start
            row += 1
            wanted += sequence_length
    if row < rows:
        last = len(packed) - 1
        sample_index[row, 0] = last
        sample_index[row, 1] = np.int64(packed[last] & _LENGTH_MASK) - extra
