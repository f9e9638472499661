"""What there is to see in an indexed dataset: counts, lengths, its first documents."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mt_data.indexed.dataset import IndexedDataset
from mt_data.indexed.manifest import Manifest
from mt_data.indexed.scan import Scan
from mt_data.indexed.statistics import LengthStatistics, length_statistics

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
