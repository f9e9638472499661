"""The order of GPT samples: document, sample and shuffle index, equal to Megatron's for the same seed.

A split's documents, once for each epoch and shuffled, form one long stream of tokens; windows of the
stream are the samples; a second shuffle orders the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.mersenne_twister import LegacyShuffler, apply_steps

Progress = Callable[[int, int], None]

FINAL_EPOCH_SHARE = 0.80
"""A last epoch of which less than this is needed is shuffled apart, so that it does not thin out the others."""
_BLOCK = 1 << 16
"""Documents that are walked at once; their lengths and offsets stay in the processor's cache."""
# Lengths are int32 and not negative, so 31 bits; 64 - 31 bits remain for the place, hence _MAX_DOCUMENTS.
_LENGTH_BITS = np.uint64(31)
_LENGTH_MASK = np.uint64((1 << 31) - 1)
_INT32_MAX = np.iinfo(np.int32).max
_MAX_DOCUMENTS = 1 << 33


@dataclass(frozen=True)
class GPTIndexPlan:
    """Everything that decides the arrays besides the documents themselves.

    tokens_per_epoch is the sum of the lengths of the split's documents; num_samples None means one
    epoch. extra is 1 when inputs and labels are one window shifted by one token, else 0.
    """

    tokens_per_epoch: int
    sequence_length: int
    num_samples: int | None
    seed: int
    extra: int = 1
    drop_last_partial: bool = True

    def key(self) -> dict[str, int | bool | None]:
        """The plan as JSON values."""
        return asdict(self)

    @property
    def epochs(self) -> int:
        """Fewest passes over the documents that give the samples requested."""
        if self.num_samples is None:
            return 1
        # Megatron-LM: GPTDataset._get_num_epochs, which adds epochs in a loop; the quotient rounded up is the same
        # number.
        return max(1, -(-(self.num_samples * self.sequence_length + self.extra) // self.tokens_per_epoch))

    @property
    def samples(self) -> int:
        """Samples that the epochs give; often more than requested."""
        # Neighbouring samples share `extra` tokens, so each one advances by sequence_length and only the last needs
        # more.
        tokens = self.epochs * self.tokens_per_epoch - self.extra
        if self.drop_last_partial:
            return max(0, tokens // self.sequence_length)
        # Megatron rounds up in 32-bit floats; where that would run past the tokens the true count is taken.
        # float32 has 24 bits: above 16.7 million tokens its quotient can be rounded to one sample too many or too few.
        exact = -(-tokens // self.sequence_length)
        return max(0, min(exact, int(np.ceil(np.float32(tokens) / np.float32(self.sequence_length)))))

    @property
    def samples_before_final_epoch(self) -> int | None:
        """Samples of all epochs but the last, when the last is shuffled apart; else None."""
        if self.epochs == 1 or self.num_samples is None:
            return None
        # Megatron-LM: num_samples_sans_final_epoch, separate_final_epoch. Example: 21 tokens an epoch, seq_length 4,
        #   num_samples 6: 2 epochs, 5 samples before the last; 1 < int(0.8 * 5), so the last is shuffled apart
        #   num_samples 10: 2 epochs, 5 before; 5 samples of the last are needed, so both are shuffled as one
        before = ((self.epochs - 1) * self.tokens_per_epoch - self.extra) // self.sequence_length
        per_epoch = (self.tokens_per_epoch - self.extra) // self.sequence_length
        apart = self.num_samples - before < int(FINAL_EPOCH_SHARE * per_epoch)
        return before if apart else None


@dataclass(frozen=True)
class GPTIndex:
    """document_index int32 [epochs * documents]: document ids in the order of the stream.

    sample_index int32 or int64 [samples + 1, 2]: (position in document_index, token within it) where each
    sample starts and the one before ends. shuffle_index uint32 or int64 [samples]: row of the k-th sample.
    """

    document_index: NDArray[np.int32]
    sample_index: NDArray[np.integer]
    shuffle_index: NDArray[np.integer]

    def arrays(self) -> dict[str, NDArray[np.integer]]:
        # The names under which the cache stores them, and Megatron's own.
        return {name: getattr(self, name) for name in ("document_index", "sample_index", "shuffle_index")}


def build_gpt_index(
    elements: range, sequence_lengths: NDArray[np.int32], plan: GPTIndexPlan, progress: Progress | None = None
) -> GPTIndex:
    """Build the three arrays for the sequences `elements`, whose lengths are in sequence_lengths [sequences].

    progress: called with (done, total) as the work goes on. Takes at most 24 bytes a document and epoch, the
    arrays included, and some 50 MB. Random numbers are drawn in a second thread.
    """
    # One generator for all shuffles. Their order is part of the result: documents (all epochs, or all but the last and
    # then the last), after them the samples.
    random = LegacyShuffler(plan.seed)
    count = len(elements) * plan.epochs
    if count > _MAX_DOCUMENTS:
        raise DataError(f"{plan.epochs} epochs of {len(elements)} documents are more than {_MAX_DOCUMENTS}")
    advance = _Advance(2 * count, progress)
    with ThreadPoolExecutor(1) as pool:  # one worker: shuffles draw one after another, in this order
        stream = _Stream(elements, sequence_lengths, plan.epochs)
        # Views of one array, which the shuffles below change in place.
        parts = [stream.packed] if plan.samples_before_final_epoch is None else stream.but_last_and_last()
        # Drawing and swapping overlap: the pool's thread draws targets while this one moves elements.
        drawn = [(part, run_ahead(pool, random.steps(len(part)))) for part in parts]
        # Needs no documents, only the state of the generator after their draws; so it runs while the samples are cut.
        order = pool.submit(shuffle_index, plan, random)
        for part, steps in drawn:
            apply_steps(part, steps, advance)
        # int32 [split's sequences]; an offset within a document is at most its length.
        longest = int(sequence_lengths[elements.start : elements.stop].max(initial=0))
        samples = _sample_index(stream.blocks(advance), count, longest, plan)
        return GPTIndex(stream.document_index, samples, order.result())


class _Advance:
    """Adds up what is done and passes it on."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)


class _Stream:
    """The documents of all epochs with their lengths, packed so that a shuffle moves both at once.

    packed uint64 [epochs * documents]: place before shuffling times 2^31, plus length. document_index is
    filled as `blocks` goes along.
    """

    def __init__(self, elements: range, sequence_lengths: NDArray[np.int32], epochs: int) -> None:
        self.elements = elements
        self.packed = np.arange(len(elements) * epochs, dtype=np.uint64)
        self.packed <<= _LENGTH_BITS
        lengths = sequence_lengths[elements.start : elements.stop].view(np.uint32)
        # [epochs, documents] |= [documents]: broadcast over the epochs, without a second array of that size.
        self.packed.reshape(epochs, len(elements))[:] |= lengths
        self.document_index = np.empty(len(self.packed), np.int32)

    def but_last_and_last(self) -> list[NDArray[np.uint64]]:
        return [self.packed[: -len(self.elements)], self.packed[-len(self.elements) :]]

    def blocks(self, advance: Callable[[int], None]) -> Iterator[NDArray[np.int64]]:
        """Lengths [documents of a block], block after block."""
        for start in range(0, len(self.packed), _BLOCK):
            packed = self.packed[start : start + _BLOCK]
            places = (packed >> _LENGTH_BITS).view(np.int64)
            # place = epoch * documents + document; with one epoch the remainder is the place itself, and the division
            # is saved.
            if len(self.packed) > len(self.elements):
                places %= len(self.elements)
            # "unsafe" allows int64 into int32: document ids fit, as Megatron's document_index is int32 too.
            np.add(places, self.elements.start, out=self.document_index[start : start + _BLOCK], casting="unsafe")
            yield (packed & _LENGTH_MASK).view(np.int64)
            advance(len(packed))


def _sample_index(
    blocks: Iterator[NDArray[np.int64]], documents: int, longest: int, plan: GPTIndexPlan
) -> NDArray[np.integer]:
    """[samples + 1, 2]: sample k ends with token k * sequence_length + extra - 1 of the stream (from 0),
    and the next one starts `extra` tokens before that end.
    """
    samples, sequence, extra = plan.samples, plan.sequence_length, plan.extra
    # Example: documents of 3, 4 and 5 tokens in this order, sequence_length 4, extra 1. Samples are tokens 0-4 and 4-8:
    #   row 0  (0, 0)
    #   row 1  (1, 1)   token 4 is the second of the document at position 1, which holds tokens 3-6
    #   row 2  (2, 1)   token 8 is the second of the document at position 2, which holds tokens 7-11
    index = np.zeros((samples + 1, 2), np.int64 if max(documents, longest) > _INT32_MAX else np.int32)
    start = stream = 0  # documents and tokens before the block
    filled = 1
    for lengths in blocks:
        # int64 [documents of the block]: token of the stream at which each document ends.
        ends = np.cumsum(lengths)
        ends += stream
        # Row k lies in the first document whose end is at least k * sequence + extra.
        rows = np.clip((ends - extra) // sequence, filled - 1, samples)
        # [documents of the block]: rows that fall into each document, several in a long one, none in a short one.
        new = np.diff(rows, prepend=filled - 1)
        which = np.flatnonzero(new)
        # [rows of the block]: document of each row.
        which = np.repeat(which, new[which])
        upto = filled + len(which)
        index[filled:upto, 0] = which + start
        # Token of the stream at which the row points, minus the begin of its document.
        index[filled:upto, 1] = np.arange(filled, upto) * sequence - (ends - lengths)[which]
        filled, start, stream = upto, start + len(lengths), int(ends[-1])
    if filled <= samples:  # a last sample that the tokens do not fill ends with the last document
        index[samples] = documents - 1, int(lengths[-1]) - extra
    return index


class Shuffler(Protocol):
    """NumPy's legacy shuffles, call after call."""

    def shuffle(self, array: NDArray[Any]) -> None: ...


def shuffle_index(plan: GPTIndexPlan, random: Shuffler) -> NDArray[np.integer]:
    """Row of the k-th sample, [samples]; drawn after the documents were shuffled."""
    count = plan.samples
    # Megatron-LM: _build_shuffle_index, the same limit and dtypes.
    dtype = np.int64 if count >= np.iinfo(np.uint32).max - 1 else np.uint32
    order: NDArray[np.integer] = np.arange(count, dtype=dtype)
    before = plan.samples_before_final_epoch
    # RandomState.shuffle draws for elements n - 1 to 1, so the length of each part decides how much it takes from the
    # generator; a part of one element takes nothing.
    if before is None or before >= count:
        random.shuffle(order)
    else:
        random.shuffle(order[:before])
        random.shuffle(order[before:])
    return order


# -- working ahead in a thread -----------------------------------------------------------------------

T = TypeVar("T")
_END: Any = object()


def run_ahead(executor: Executor, iterator: Iterator[T]) -> Iterator[T]:
    """What `iterator` yields, computed in `executor` from now on; its exception is raised here."""
    # Not bounded: the producer never waits, so an abandoned consumer cannot block the executor's shutdown.
    queue: SimpleQueue[T] = SimpleQueue()

    def work() -> None:
        try:
            for item in iterator:
                queue.put(item)
        finally:
            # After an error too, so that the consumer wakes up; result() then raises it there.
            queue.put(_END)

    future = executor.submit(work)

    def items() -> Iterator[T]:
        while (item := queue.get()) is not _END:
            yield item
        future.result()

    return items()
