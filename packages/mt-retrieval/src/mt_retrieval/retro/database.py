"""The chunk database of a Retro project: `build_database`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_core.parallel.context import is_writer, wait_for_all
from mt_core.paths import writing
from mt_data.datasets.retro.database import ChunkDatabase, TokenSource, open_chunks
from mt_data.datasets.retro.project import (
    CHUNKS,
    MANIFEST,
    ChunkCounts,
    DatabaseJob,
    DatabaseManifest,
    Text,
    database_folder,
    read_database,
)
from mt_data.datasets.splits import parse_split
from mt_data.indexed.dataset import IndexedDataset
from mt_data.records import blocked_file, read_record, write_array, write_record
from mt_data.tokenizers.recorded import recorded_tokenizer
from mt_retrieval.retro.blocks import (
    CHUNK_LENGTH,
    DOCUMENTS_OF_BLOCK,
    SPLIT,
    Bars,
    Blocks,
    OnProgress,
    no_bars,
    ranges,
    require_same_job,
    share_of_world,
    write_blocks,
)

# -- documents cut into chunks -----------------------------------------------------------------------

BLANK = 0
"""In place of the hash of a chunk whose text is white space."""


class ChunkCutter:
    """Cuts documents into consecutive chunks of `length` tokens, the last one shorter. A final end-of-document token is
    dropped, as in Megatron."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self.length = length
        self._eod = tokenizer.special.eod

        # By token: a vocabulary is small beside the tokens of a corpus.
        @cache
        def is_blank(token: int) -> bool:
            return token == self._eod or not tokenizer.decode([token]).strip()

        self._is_blank: Callable[[int], bool] = is_blank

    def cut(
        self, source: TokenSource, text: int, documents: range, on_documents: Callable[[int], None]
    ) -> NDArray[np.uint64]:
        """[chunks, 5] of these documents: text, document, first token, tokens, hash of the tokens or BLANK."""
        rows: list[tuple[int, int, int, int, int]] = []
        for count, document in enumerate(documents, 1):
            tokens = self._without_eod(source.read(document).astype(np.int64))
            rows += [(text, document, first, len(chunk), self._hash(chunk)) for first, chunk in self._chunks(tokens)]
            on_documents(count)
        # reshape: an array of no rows has one dimension.
        return np.array(rows, np.uint64).reshape(-1, 5)

    def _without_eod(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return tokens[:-1] if len(tokens) and tokens[-1] == self._eod else tokens

    def _chunks(self, tokens: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for first in range(0, len(tokens), self.length):
            yield first, tokens[first : first + self.length]

    def _hash(self, chunk: NDArray[np.int64]) -> int:
        if all(self._is_blank(token) for token in chunk.tolist()):
            return BLANK
        # 64 bits of the int64 tokens, little-endian. The value 0 is BLANK: one chunk in 2^64 would be taken for white
        # space.
        return int.from_bytes(blake2b(chunk.tobytes(), digest_size=8).digest(), "little")


HASH = 4
"""Column of a block, behind those of the chunk table."""


def build_database(
    project: Path,
    prefixes: Sequence[str],
    *,
    split: str = SPLIT,
    chunk_length: int = CHUNK_LENGTH,
    deduplicate: bool = False,
    tokenizer_type: str | None = None,
    tokenizer_entries: Mapping[str, Any] = MappingProxyType({}),
    block_documents: int = DOCUMENTS_OF_BLOCK,
    bars: Bars = no_bars,
) -> DatabaseManifest:
    """Cuts the documents of indexed datasets into chunks, and writes those that are searched: of training documents,
    with a content that no chunk of a validation or test document has. Collective. Killed, the same call continues.

    prefixes: of `.bin` and `.idx` with one tokenizer. split: shares of train, validation and test of each one's
    documents, as those of the data set "gpt". deduplicate: of chunks with equal tokens keep the first.
    tokenizer_type, tokenizer_entries: the tokenizer, where the manifests of the files do not say it or its files moved.

    Raises ConfigError for a project of another database, DataError for files of several tokenizers.
    """
    texts = [IndexedDataset(prefix, verify_checksums=True) for prefix in prefixes]
    tokenizer, recorded = tokenizer_of(texts, tokenizer_type, tokenizer_entries)
    job = DatabaseJob(
        texts=tuple(Text(fingerprint=text.fingerprint(), documents=len(text)) for text in texts),
        tokenizer=tokenizer.fingerprint(),
        chunk_length=chunk_length,
        split=parse_split(split, "--split").text,
        deduplicate=deduplicate,
        block_documents=block_documents,
    )
    _require_different(job, prefixes)
    folder = database_folder(project)
    manifest = DatabaseManifest(job=job, prefixes=tuple(str(Path(p).absolute()) for p in prefixes), tokenizer=recorded)
    if is_writer():
        with writing(project, "PROJECT"):
            _begin(folder, manifest)
    wait_for_all()
    # Steps: each rank cuts its blocks of documents; the first one merges them to the table of chunks that are searched.
    blocks = DatabaseBlocks.of(folder, job)
    with bars("cutting documents") as update:
        blocks.write(ChunkCutter(tokenizer, chunk_length), texts, update)
    if is_writer():
        with bars("merging blocks") as update:
            # All chunks in the memory of one process, 25 bytes each: a hash is compared with those of all texts.
            table, counts = searched(blocks.read(update), deduplicate)
        _require_chunks(counts, job)
        # The manifest gets the table's hash after the table is whole: until then read_database finds the project
        # incomplete.
        write_array(folder, CHUNKS, table)
        complete = {"counts": counts, "chunks": blocked_file(folder / CHUNKS)}
        write_record(folder / MANIFEST, manifest.model_copy(update=complete))
    wait_for_all()
    return read_database(folder)


def open_database(project: Path) -> ChunkDatabase:
    """Raises DataError for a project without a complete database, or texts that have changed."""
    folder = database_folder(project)
    manifest = read_database(folder)
    texts = [IndexedDataset(prefix, verify_checksums=True) for prefix in manifest.prefixes]
    return open_chunks(folder, manifest, texts)


def tokenizer_of(
    texts: Sequence[IndexedDataset], tokenizer_type: str | None, entries: Mapping[str, Any]
) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer that all texts were made with, and how it is recorded."""
    manifests = [text.manifest() for text in texts]
    recorded = [dict(manifest.tokenizer or {}) if manifest else {} for manifest in manifests]
    if tokenizer_type is None and "tokenizer_type" not in recorded[0]:
        raise ConfigError(
            f"{texts[0].prefix} does not record its tokenizer; name it with --tokenizer-type and --tokenizer KEY=VALUE"
        )
    built = recorded_tokenizer(recorded[0], tokenizer_type, entries)
    for text, other in zip(texts, recorded, strict=True):
        fingerprint = other.get("fingerprint", built.fingerprint())
        if fingerprint != built.fingerprint():
            raise DataError(
                f"{text.prefix} was made with the tokenizer {fingerprint[:16]}..., and {texts[0].prefix} with "
                f"{built.fingerprint()[:16]}...; a database has one tokenizer"
            )
    chosen: dict[str, Any] = recorded[0] if tokenizer_type is None else {"tokenizer_type": tokenizer_type}
    config = {**chosen.get("config", {}), **entries}
    return built, {**chosen, "config": config, "fingerprint": built.fingerprint()}


@dataclass(frozen=True)
class DatabaseBlocks:
    """Blocks of the chunks of all documents: uint64 [chunks, 5], see `ChunkCutter`. parts: text and documents."""

    files: Blocks
    job: DatabaseJob
    parts: Sequence[tuple[int, range]]

    @classmethod
    def of(cls, folder: Path, job: DatabaseJob) -> DatabaseBlocks:
        parts = [
            (number, documents)
            for number, text in enumerate(job.texts)
            for documents in ranges(text.documents, job.block_documents)
        ]
        return cls(Blocks(folder / "blocks", "chunks", "run mt retro db build again, which replaces it"), job, parts)

    def write(self, cutter: ChunkCutter, texts: Sequence[TokenSource], on_progress: OnProgress) -> None:
        """Those that are not there. Collective."""

        def compute(number: int, on_rows: Callable[[int], None]) -> NDArray[np.uint64]:
            return self.cut(cutter, texts, number, on_rows)

        sizes = [len(documents) for _, documents in self.parts]
        write_blocks(self.files, sizes, range(len(sizes)), compute, share_of_world(), on_progress)

    def cut(
        self, cutter: ChunkCutter, texts: Sequence[TokenSource], number: int, on_rows: Callable[[int], None]
    ) -> NDArray[np.uint64]:
        text, documents = self.parts[number]
        return cutter.cut(texts[text], text, documents, on_rows)

    def read(self, on_progress: OnProgress) -> ChunkRows:
        """All blocks, one after the other."""
        # An empty part first, so that a project without documents concatenates something.
        parts = [ChunkRows(np.zeros((0, HASH), np.uint32), np.zeros(0, np.uint64), np.zeros(0, np.bool_))]
        for number, (text, _) in enumerate(self.parts):
            rows = np.asarray(self.files.read(number), np.uint64)
            parts.append(
                # uint64 in the blocks, for the hash; the table's own columns fit 32 bits. Documents of a text are split
                # by number: training ones come first.
                ChunkRows(rows[:, :HASH].astype(np.uint32), rows[:, HASH], rows[:, 1] < self.job.train_documents(text))
            )
            on_progress(number + 1, len(self.parts))
        return ChunkRows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class ChunkRows(NamedTuple):
    """table: uint32 [chunks, 4]. hashes: uint64 [chunks], or BLANK. is_train: [chunks], whether of a training
    document."""

    table: NDArray[np.uint32]
    hashes: NDArray[np.uint64]
    is_train: NDArray[np.bool_]


def searched(chunks: ChunkRows, deduplicate: bool) -> tuple[NDArray[np.uint32], ChunkCounts]:
    """The rows of the chunks that are searched, in their order."""
    blank = chunks.hashes == BLANK
    # A training chunk with the tokens of a held-out one would show the model, as a neighbour, the text that it is
    # evaluated on.
    held_out = ~blank & ~chunks.is_train
    copied = ~blank & chunks.is_train & np.isin(chunks.hashes, chunks.hashes[held_out])
    kept = ~blank & chunks.is_train & ~copied
    # After held-out copies are left out: the first of equal chunks is one that is kept.
    again = kept & ~_is_first(chunks.hashes, kept) if deduplicate else np.zeros_like(kept)
    kept &= ~again
    counts = {"cut": np.ones_like(blank), "blank": blank, "held_out": held_out, "also_held_out": copied}
    sums = {name: int(mask.sum()) for name, mask in (counts | {"duplicates": again, "kept": kept}).items()}
    return chunks.table[kept], ChunkCounts(**sums)


def _is_first(hashes: NDArray[np.uint64], among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[chunks], True for the first of those that have equal hashes."""
    places = np.flatnonzero(among)
    first = np.zeros_like(among)
    # np.unique returns the first place of each value.
    first[places[np.unique(hashes[places], return_index=True)[1]]] = True
    return first


def _begin(folder: Path, manifest: DatabaseManifest) -> None:
    """Make the folder, or check that what is in it belongs to the same job, whose texts may have moved."""
    if (folder / MANIFEST).exists():
        stored = read_record(folder / MANIFEST, DatabaseManifest)
        require_same_job(folder, stored.job, manifest.job)
    write_record(folder / MANIFEST, manifest)


def _require_different(job: DatabaseJob, prefixes: Sequence[str]) -> None:
    fingerprints = [text.fingerprint for text in job.texts]
    for number, fingerprint in enumerate(fingerprints):
        if (first := fingerprints.index(fingerprint)) < number:
            raise ConfigError(f"{prefixes[number]} and {prefixes[first]} are the same text; give each text once")


def _require_chunks(counts: ChunkCounts, job: DatabaseJob) -> None:
    if not counts.kept:
        raise DataError(
            f'no chunk is left to search, of {counts.cut}: --split "{job.split}" gives the training documents; give '
            "them a larger share, or add text"
        )


def database_tokenizer(project: Path) -> Tokenizer:
    """The tokenizer that is recorded of the texts."""
    return recorded_tokenizer(read_database(database_folder(project)).tokenizer)
