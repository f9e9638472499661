"""Data sets over indexed token files whose sequences are the sentences of documents."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from math import floor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.interfaces import Dataset, SplitRequest, Tokenizer
from mt_data.datasets.cache import index_progress
from mt_data.datasets.config import IndexedDataConfig
from mt_data.datasets.mersenne_twister import Mt19937, shuffle_order
from mt_data.datasets.opening import BuiltSplit, OpenedTokens, build_from_files


class SentenceSource(Protocol):
    """What is read of an indexed dataset (mt_data.indexed): a sequence is a sentence.

    document_indices int64 [documents + 1]: number of the first sentence of each document, and of all.
    """

    @property
    def sequence_lengths(self) -> NDArray[np.int32]: ...

    @property
    def document_indices(self) -> NDArray[np.int64]: ...

    def read(self, index: int) -> np.ndarray: ...

    def fingerprint(self) -> str: ...


class SentenceSamples:
    """Rows of a sentence index (mt_data.datasets.sentences), with the sentences behind them."""

    def __init__(self, source: SentenceSource, index: NDArray[np.unsignedinteger], vocab_size: int, name: str) -> None:
        self.source = source
        self.index = index
        self.vocab_size = vocab_size
        self.name = name

    def __len__(self) -> int:
        return len(self.index)

    def fingerprint(self) -> str:
        """The content of the token file."""
        return self.source.fingerprint()

    def row(self, index: int) -> list[int]:
        """The numbers of row `index`; IndexError outside of [0, len)."""
        if not 0 <= index < len(self.index):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self.index)} samples")
        return self.index[index].tolist()

    def sentences(self, index: int) -> list[NDArray[np.int64]]:
        """The tokens of each sentence of a sample. Raises DataError for an id that the tokenizer does not have."""
        first, end = self.row(index)[:2]
        sentences = [self.source.read(number).astype(np.int64) for number in range(first, end)]
        for number, tokens in enumerate(sentences, first):
            # As unsigned numbers negative ids are the largest.
            if len(tokens) and tokens.view(np.uint64).max() >= self.vocab_size:
                raise DataError(
                    f"{self.name}, sentence {number} has ids from {tokens.min()} to {tokens.max()}, and the tokenizer "
                    f"has {self.vocab_size} ids; configure the tokenizer that the data was made with, or "
                    "preprocess the text again"
                )
        return sentences

    def describe(self, index: int) -> str:
        first, end = self.row(index)[:2]
        bounds = self.source.document_indices
        document = int(np.searchsorted(bounds, first, side="right")) - 1
        start = int(bounds[document])
        return f"{self.name}: document {document}, sentences {first - start}..{end - 1 - start}"


class SentenceDataset:
    """Base of data sets whose sample k is made of row k of a sentence index."""

    def __init__(self, samples: SentenceSamples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def fingerprint(self) -> str:
        """The content of the token file."""
        return self.samples.fingerprint()

    def describe(self, index: int) -> str:
        return self.samples.describe(index)


def build_sentence_datasets(
    config: IndexedDataConfig,
    tokenizer: Tokenizer,
    request: SplitRequest,
    plan: SentenceIndexPlan,
    make: Callable[[SentenceSamples], Dataset],
) -> BuiltSplit:
    """`make` of the samples of each token file by `plan`, blended; None for a split without data."""

    def make_one(tokens: OpenedTokens, num_samples: int | None) -> Dataset:
        sized_plan = replace(plan, num_samples=num_samples)
        return make(SentenceSamples(tokens.reader, _index(tokens, sized_plan), tokenizer.vocab_size, tokens.name))

    return build_from_files(config, tokenizer, request, make_one)


def _index(tokens: OpenedTokens, plan: SentenceIndexPlan) -> NDArray[np.unsignedinteger]:
    reader = tokens.reader
    elements = tokens.elements(reader.num_documents, "documents")
    # [documents of the split + 1]: one boundary more than documents, the end of the last one. Splits are cut between
    # documents here, between sequences in GPT data sets, as in Megatron.
    bounds = reader.document_indices[elements.start : elements.stop + 1]

    def build() -> dict[str, NDArray[np.unsignedinteger]]:
        title = f"sentence index of {tokens.name}, {tokens.split}"
        with index_progress(title, plan.num_samples or len(elements)) as progress:
            return {"samples": build_sentence_index(bounds, reader.sequence_lengths, plan, progress)}

    try:
        return tokens.cache.get(tokens.cache_key("sentences", elements, **asdict(plan)), build)["samples"]
    except DataError as error:
        raise DataError(f"{tokens.name}, {tokens.split} split: {error}") from error


# -- samples: which sentences they consist of --------------------------------------------------------
#
# The rules, the random numbers and so the arrays are those of Megatron's two C++ loops (`build_mapping`
# for BERT and T5, `build_blocks_mapping` for the inverse cloze task). A sample is some consecutive
# sentences of one document: it closes when it is long enough and leaves enough sentences for another one,
# or else at the end of the document.

LONG_SENTENCE = 512
"""Documents with a longer sentence (in tokens) are left out, unless it is their only one."""
_BLOCK = 1 << 19
"""About so many sentences are walked at once."""
_DRAWS = 1 << 16

Progress = Callable[[int, int], None]
"""Called with what is done and how much there is: samples, or documents of a single epoch."""


@dataclass(frozen=True)
class SentenceIndexPlan:
    """Everything that decides the samples besides the documents.

    max_length: tokens of a sample without the special ones. min_sentences: 2 when a sample is a pair, else
    1. num_samples None means one epoch. About one in round(1 / short_sequence_probability) samples has a
    shorter length, drawn evenly.
    """

    max_length: int
    min_sentences: int
    short_sequence_probability: float
    num_samples: int | None
    seed: int


@dataclass(frozen=True)
class BlockIndexPlan:
    """Everything that decides the blocks besides documents and titles.

    max_length: tokens of title and block together. min_sentences: of a document, a block, and what a block
    leaves over. num_samples None means one epoch.
    """

    max_length: int
    min_sentences: int
    num_samples: int | None
    seed: int


def build_sentence_index(
    document_indices: NDArray[np.int64],
    sequence_lengths: NDArray[np.int32],
    plan: SentenceIndexPlan,
    progress: Progress = lambda done, total: None,
) -> NDArray[np.unsignedinteger]:
    """Rows (first sentence, one past the last, length to cut to): [samples, 3], shuffled.

    document_indices [documents + 1] are the documents of the split, as sentence numbers; sequence_lengths
    [all sentences]. uint32, or uint64 for more than 2^32 sentences. Epochs are added until there are
    num_samples, whole ones only. Raises DataError when no document gives a sample.
    """
    targets = _target_lengths(plan)
    parts: list[NDArray[np.int64]] = []
    samples, asked = 0, plan.num_samples or 0
    # One round is one epoch over all documents, also when the number is reached in the middle of it.
    while samples == 0 or samples < asked:
        walked = 0
        for documents in _blocks(document_indices):
            # `targets` goes on from epoch to epoch, so each epoch cuts the documents differently where lengths are
            # drawn.
            parts.append(_walk(documents, sequence_lengths, plan, targets))
            samples += len(parts[-1])
            walked += len(documents) - 1
            if asked:
                progress(min(samples, asked), asked)
            else:
                progress(walked, len(document_indices) - 1)
        if samples == 0:
            raise _no_samples(document_indices, plan.min_sentences)
    return _shuffled(parts, plan.seed, sequence_lengths)


def build_block_index(
    document_indices: NDArray[np.int64],
    sequence_lengths: NDArray[np.int32],
    title_lengths: NDArray[np.integer],
    plan: BlockIndexPlan,
) -> NDArray[np.unsignedinteger]:
    """Rows (first sentence, one past the last, document, block): [samples, 4], shuffled.

    A block of document d closes at plan.max_length - title_lengths[d] tokens. Documents count from the first of
    document_indices, blocks from 0 in each epoch, so that a block has the same number in all epochs.
    Raises DataError when no document gives a block.
    """
    parts, document = [], 0
    for documents in _blocks(document_indices):
        # [documents of the block]
        titles = title_lengths[document : document + len(documents) - 1]
        targets = plan.max_length - titles.astype(np.int64)
        rows = _walk_blocks(documents, sequence_lengths, targets, plan.min_sentences)
        rows[:, 2] += document
        document += len(documents) - 1
        parts.append(rows)
    once = np.concatenate(parts)
    if not len(once):
        raise _no_samples(document_indices, plan.min_sentences)
    # Block numbers are the same in every epoch, as the walk draws nothing; Megatron resets block_id at each epoch too.
    once[:, 3] = np.arange(len(once))
    epochs = 1 if plan.num_samples is None else max(1, -(-plan.num_samples // len(once)))
    return _shuffled([once] * epochs, plan.seed, sequence_lengths)


def _no_samples(document_indices: NDArray[np.int64], min_sentences: int) -> DataError:
    return DataError(
        f"none of the {len(document_indices) - 1} documents of the split gives a sample: each needs at least "
        f"{min_sentences} sentences, none longer than {LONG_SENTENCE} tokens; preprocess with "
        "--split-sentences, or give this split more documents with data.split"
    )


def _shuffled(
    parts: list[NDArray[np.int64]], seed: int, sequence_lengths: NDArray[np.int32]
) -> NDArray[np.unsignedinteger]:
    wide = len(sequence_lengths) > np.iinfo(np.uint32).max
    # seed + 1 as in Megatron's helpers.cpp, whose lengths use `seed`.
    rows = np.concatenate(parts)[shuffle_order(sum(map(len, parts)), seed + 1)]
    return rows.astype(np.uint64 if wide else np.uint32)


def _blocks(document_indices: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The boundaries [documents of the block + 1] of some documents at a time."""
    start = 0
    while start < len(document_indices) - 1:
        # Whole documents up to _BLOCK sentences, but at least one, however long.
        limit = int(document_indices[start]) + _BLOCK
        stop = max(start + 1, int(np.searchsorted(document_indices, limit, side="right")) - 1)
        yield document_indices[start : stop + 1]
        start = stop


def _target_lengths(plan: SentenceIndexPlan) -> Iterator[int]:
    """The length of each sample, drawn one after the other; endless."""
    if plan.short_sequence_probability <= 0:
        return repeat(plan.max_length)
    # C++'s round: a half goes away from zero.
    ratio = np.uint32(floor(1.0 / plan.short_sequence_probability + 0.5))
    random = Mt19937(plan.seed)

    def some() -> Iterator[list[int]]:
        while True:
            numbers = random.draw(_DRAWS)
            # One number decides both, as in Megatron's get_target_sample_len: whether the sample is short, and how long
            # it is.
            short = 2 + numbers % np.uint32(plan.max_length - 1)
            yield np.where(numbers % ratio == 0, short, np.uint32(plan.max_length)).tolist()

    return chain.from_iterable(some())


def _walk(
    documents: NDArray[np.int64],
    sequence_lengths: NDArray[np.int32],
    plan: SentenceIndexPlan,
    targets: Iterator[int],
) -> NDArray[np.int64]:
    """Samples (first, end, target) of the documents, whose boundaries are given: [samples, 3].

    Each usable document takes a target when it starts and one after each sample, the last one unused.
    """
    # Everything below counts sentences from the first of this block of documents; `base` is added at the end.
    base, full, fewest = int(documents[0]), plan.max_length, plan.min_sentences
    tokens = _tokens_before(documents, sequence_lengths)
    # Most samples have the full length: where these end is computed for all sentences at once, [sentences]. Short
    # targets are searched one by one below.
    closes = _closing_sentences(documents - base, tokens, np.int64(full), fewest, min_left=2).tolist()
    before = tokens.tolist()
    usable = _usable(documents, sequence_lengths, fewest, alone_may_be_long=True)
    firsts, lasts = (documents[:-1] - base)[usable].tolist(), (documents[1:] - base)[usable].tolist()
    rows: list[tuple[int, int, int]] = []
    for start, last in zip(firsts, lasts, strict=True):
        target = next(targets)
        while start < last:
            if target == full:
                end = closes[start]
            else:
                # The same rule as in _closing_sentences, for one start.
                end = max(bisect_left(before, before[start] + target, start), start + fewest)
                end = last if end > last - 2 else end
            rows.append((start, end, target))
            start = end
            target = next(targets)
    samples = np.array(rows, np.int64).reshape(-1, 3)
    samples[:, :2] += base
    return samples


def _walk_blocks(
    documents: NDArray[np.int64],
    sequence_lengths: NDArray[np.int32],
    targets: NDArray[np.int64],
    min_sentences: int,
) -> NDArray[np.int64]:
    """Blocks (first, end, document counted from the first given, 0): [blocks, 4]; targets [documents]."""
    base = int(documents[0])
    tokens = _tokens_before(documents, sequence_lengths)
    closes = _closing_sentences(documents - base, tokens, targets, min_sentences, min_left=min_sentences).tolist()
    usable = _usable(documents, sequence_lengths, min_sentences, alone_may_be_long=False)
    rows: list[tuple[int, int, int, int]] = []
    for document in np.flatnonzero(usable).tolist():
        start, last = int(documents[document]) - base, int(documents[document + 1]) - base
        while start < last:
            rows.append((start, closes[start], document, 0))
            start = closes[start]
    blocks = np.array(rows, np.int64).reshape(-1, 4)
    blocks[:, :2] += base
    return blocks


def _tokens_before(documents: NDArray[np.int64], sequence_lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """[sentences + 1]: tokens before each sentence of the documents, and in all."""
    lengths = sequence_lengths[int(documents[0]) : int(documents[-1])]
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _closing_sentences(
    bounds: NDArray[np.int64],
    tokens_before: NDArray[np.int64],
    targets: NDArray[np.int64] | np.int64,
    min_sentences: int,
    min_left: int,
) -> NDArray[np.int64]:
    """[sentences]: where a sample that starts with each sentence ends.

    bounds [documents + 1] and tokens_before [sentences + 1] count from the first sentence; targets is one
    length or one a document. A sample that would leave fewer than min_left sentences takes them all.
    """
    counts = np.diff(bounds)
    starts = np.arange(len(tokens_before) - 1)
    target = np.repeat(np.broadcast_to(targets, counts.shape), counts)
    # First sentence boundary at which at least `target` tokens lie behind the start; past the document's end where the
    # document is shorter, which the comparison with `last` puts right.
    ends = np.searchsorted(tokens_before, tokens_before[:-1] + target)
    ends = np.maximum(ends, starts + min_sentences)
    last = np.repeat(bounds[1:], counts)
    return np.where(ends > last - min_left, last, ends)


def _usable(
    document_indices: NDArray[np.int64],
    sequence_lengths: NDArray[np.int32],
    min_sentences: int,
    *,
    alone_may_be_long: bool,
) -> NDArray[np.bool_]:
    """[documents]: whether a document has sentences enough and no overlong one."""
    start = int(document_indices[0])
    long = sequence_lengths[start : int(document_indices[-1])] > LONG_SENTENCE
    # [documents + 1]: overlong sentences before each boundary; equal at both ends of a document that has none.
    before = np.concatenate([[0], np.cumsum(long)])[document_indices - start]
    count = np.diff(document_indices)
    short = np.diff(before) == 0
    if alone_may_be_long:
        # Megatron's build_mapping looks for long sentences only in documents of more than one; build_blocks_mapping
        # always.
        short |= count == 1
    return (count >= min_sentences) & short
