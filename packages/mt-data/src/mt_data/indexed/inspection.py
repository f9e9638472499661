"""Inspection of an indexed dataset: counts, lengths, its first documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mt_data.indexed.dataset import IndexedDataset, Scan
from mt_data.indexed.manifest import Manifest

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class DocumentPreview:
    """The beginning of a document."""

    number: int
    sequences: int
    tokens: int
    ids: list[int | float]
    """The first ids; all of them when there are `tokens`."""
    text: str | None
    """The text of `ids`, None without a tokenizer."""


@dataclass(frozen=True)
class Inspection:
    """What `inspect_dataset` found."""

    prefix: str
    dtype: str
    multimodal: bool
    sequences: int
    documents: int
    empty_documents: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    lengths: LengthStatistics
    manifest: Manifest | None
    first_documents: list[DocumentPreview]

    def to_json(self) -> dict[str, Any]:
        """Plain values; `manifest` is null when there is none, and without the checksums of blocks."""
        values = asdict(self)
        values["lengths"]["mean"] = self.lengths.mean
        return values | {"manifest": self.manifest and self.manifest.model_dump(exclude={"bin_blocks"})}


def inspect_dataset(
    prefix: str | os.PathLike[str],
    *,
    documents: int = 3,
    max_tokens: int = 64,
    find_decoder: Callable[[Manifest | None], Decode | None] = lambda manifest: None,
) -> Inspection:
    """Read the index, and at most `max_tokens` tokens of each of the first `documents` documents.

    find_decoder: gives the way from ids to text, once the manifest is known. Raises DataError for damaged files.
    """
    # Scan for passes over whole arrays with bounded memory; IndexedDataset for random access to the previews.
    scan = Scan(os.fspath(prefix))
    layout = scan.layout
    dataset = IndexedDataset(scan.prefix, multimodal=layout.multimodal)
    manifest = dataset.manifest()
    decode = find_decoder(manifest) if documents else None
    return Inspection(
        prefix=scan.prefix,
        dtype=layout.dtype.name,
        multimodal=layout.multimodal,
        sequences=layout.num_sequences,
        documents=layout.num_documents,
        empty_documents=_empty_documents(scan),
        tokens=scan.sizes.num_tokens,
        bin_bytes=scan.sizes.data_bytes,
        idx_bytes=scan.sizes.index_bytes,
        lengths=length_statistics(scan.lengths),
        manifest=manifest,
        first_documents=[
            preview_document(dataset, number, max_tokens, decode)
            for number in range(min(documents, layout.num_documents))
        ],
    )


def preview_document(dataset: IndexedDataset, number: int, max_tokens: int, decode: Decode | None) -> DocumentPreview:
    """The first `max_tokens` tokens of a document, sequences joined. Raises IndexError when there is none."""
    begin, end = dataset.document_indices[number : number + 2].tolist()
    tokens = int(dataset.sequence_lengths[begin:end].sum(dtype=np.int64))
    ids: list[int | float] = []
    for sequence in range(begin, end):
        if len(ids) == max_tokens:
            break
        length = int(dataset.sequence_lengths[sequence])
        ids += dataset.get(sequence, 0, min(length, max_tokens - len(ids))).tolist()
    text = None if decode is None else decode([int(value) for value in ids])
    return DocumentPreview(number, end - begin, tokens, ids, text)


def _empty_documents(scan: Scan) -> int:
    # -1 before the first boundary, 0: their difference is not 0 and counts no document.
    empty, before = 0, -1
    for boundaries in scan.boundaries():
        empty += int(np.count_nonzero(np.diff(boundaries, prepend=before) == 0))
        before = int(boundaries[-1])
    return empty


# -- statistics of lengths, exact, in memory that does not depend on their number --------------------

# Lengths have 31 bits (int32, not negative): 15 high bits and 16 low ones. 33 bins: 0 to 32 binary digits.
LOW_BITS = 16
BINS = 33
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths of sequences in tokens."""

    count: int
    total: int
    shortest: int
    longest: int
    empty: int
    percentiles: dict[int, int]
    """Percent p to the shortest length that at least p % of the sequences do not exceed."""
    histogram: list[tuple[int, int, int]]
    """(first length, last length, sequences), from the first to the last bin that is not empty; the bins are
    0, 1, 2 to 3, 4 to 7 and so on."""

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


def length_statistics(
    read: Callable[[], Iterable[np.ndarray]], percentiles: Sequence[int] = PERCENTILES
) -> LengthStatistics:
    """Statistics of the lengths that `read()` yields in arrays [chunk]; it is called three times."""
    count, total, shortest, longest, bins = 0, 0, 2**31, 0, np.zeros(BINS, np.int64)
    for lengths in read():
        count += len(lengths)
        total += int(lengths.sum(dtype=np.int64))
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        # frexp gives the number of binary digits: 0 for 0, 1 for 1, 2 for 2 and 3, ...
        # float64 holds every int32 exactly; float32 would round 2^24 + 1 and more, and so move lengths to the next bin.
        bins += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=BINS)
    return LengthStatistics(
        count=count,
        total=total,
        shortest=shortest if count else 0,
        longest=longest,
        empty=int(bins[0]),
        percentiles=dict(zip(percentiles, _percentiles(read, count, percentiles), strict=True)) if count else {},
        histogram=list(_filled(bins)),
    )


def _percentiles(read: Callable[[], Iterable[np.ndarray]], count: int, percentiles: Sequence[int]) -> list[int]:
    """Selection by digits of 16 bits: the high ones first, then the low ones within the high ones requested."""
    # Nearest-rank percentiles: the k-th smallest with k = ceil(count * percent / 100), from 1.
    ranks = [max(1, -(-count * percent // 100)) for percent in percentiles]
    # int64 [2^15]: sequences by the high bits of their length. Two passes with 2^15 and 2^16 counters find an exact
    # rank; one pass would need 2^31 counters or all lengths in memory.
    above = np.zeros(1 << (31 - LOW_BITS), np.int64)
    for lengths in read():
        above += np.bincount(lengths >> LOW_BITS, minlength=len(above))
    # Sequences whose high bits are at most k; the requested rank lies at the first k whose count reaches it.
    ends = np.cumsum(above)
    highs = [int(np.searchsorted(ends, rank)) for rank in ranks]
    below = {high: np.zeros(1 << LOW_BITS, np.int64) for high in highs}
    for lengths in read():
        for high, counts in below.items():
            low = lengths[lengths >> LOW_BITS == high] & ((1 << LOW_BITS) - 1)
            counts += np.bincount(low, minlength=len(counts))
    return [
        # The rank within the bucket: what lies below the bucket is subtracted.
        (high << LOW_BITS) + int(np.searchsorted(np.cumsum(below[high]), rank - (ends[high] - above[high])))
        for high, rank in zip(highs, ranks, strict=True)
    ]


def _filled(bins: np.ndarray) -> Iterator[tuple[int, int, int]]:
    used = np.flatnonzero(bins)
    for digits in range(used[0], used[-1] + 1) if len(used) else ():
        first, last = (0, 0) if digits == 0 else (1 << (digits - 1), (1 << digits) - 1)
        yield first, last, int(bins[digits])
