"""Does one shard: reads its parts, encodes the documents, writes an indexed dataset for each key."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import numpy as np

from mt_core.errors import DataError
from mt_core.interfaces import Tokenizer
from mt_data.indexed.layout import LENGTH, POINTER, Layout
from mt_data.preprocess.encoder import DocumentEncoder, GivenTokenizer, TokenizerChoice
from mt_data.preprocess.files import write_atomically
from mt_data.preprocess.options import Counts, OnError, Splitter
from mt_data.preprocess.parts import PartReader, ReadOptions, Shard, shard_name
from mt_data.preprocess.readers import MalformedRecord
from mt_data.preprocess.sentences import build_splitter


@dataclass(frozen=True)
class Task:
    """All that a process needs to do shards; equal for all shards of a run, and small."""

    folder: str
    """Where shards are written."""
    tokenizer: TokenizerChoice | GivenTokenizer
    fingerprint: str
    json_keys: tuple[str, ...]
    level: str
    dtype: str
    append_eod: bool
    splitter: tuple[Splitter, str, bool] | None
    """Arguments of `build_splitter`, None where a text is one sequence."""
    on_error: OnError
    read: ReadOptions


@dataclass(frozen=True)
class ShardResult:
    """A finished shard; `sizes` are those of its files."""

    order: tuple[int, int]
    counts: Counts
    sizes: dict[str, int]

    @property
    def name(self) -> str:
        return shard_name(self.order)


def shard_prefix(folder: Path, name: str, key: str, level: str) -> Path:
    return folder / f"{name}_{key}_{level}"


def done_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.done.json"


def skipped_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.skipped.jsonl"


def run_shard(task: Task, shard: Shard, encoder: DocumentEncoder | None = None) -> ShardResult:
    """Do a shard and leave its outputs and, last, the file that says so, in `task.folder`.

    encoder: the one of this run where it has been made already; by default it is made once in a process.
    Raises MalformedRecord for a line that cannot be used (unless task.on_error is "skip"), DataError for
    an input that cannot be read, and for a disk that is full.
    """
    try:
        return _ShardRun(task, shard).run(encoder or encoder_of(task))
    except OSError as error:
        raise DataError(
            f"{task.folder}: cannot be written: {error.strerror or error}; when that is put right, the same "
            "command goes on where this one ended"
        ) from error


class _ShardRun:
    def __init__(self, task: Task, shard: Shard) -> None:
        self.task, self.shard = task, shard
        self.folder = Path(task.folder)
        self.counts = Counts(input_bytes=shard.input_bytes)

    def run(self, encoder: DocumentEncoder) -> ShardResult:
        name = self.shard.name
        prefixes = [shard_prefix(self.folder, name, key, self.task.level) for key in self.task.json_keys]
        skipped = skipped_path(self.folder, name)
        # On an error the stack removes the temporary files of all writers, in the order opposite to their opening.
        with ExitStack() as stack:
            # "w": what an interrupted attempt at this shard left is overwritten.
            self._skipped = stack.enter_context(open(skipped, "w", encoding="utf-8"))
            dtype = np.dtype(self.task.dtype)
            writers = [stack.enter_context(ShardWriter(prefix, dtype, encoder.vocab_size)) for prefix in prefixes]
            self._write(encoder, writers)
            for key, writer in zip(self.task.json_keys, writers, strict=True):
                writer.finish()
                self.counts.sequences[key], self.counts.tokens[key] = writer.sequences, writer.tokens
        if not self.counts.skipped:
            skipped.unlink()
        # PartialFolder.result compares these before it takes the shard over.
        sizes = {file.name: file.stat().st_size for prefix in prefixes for file in output_files(prefix)}
        result = ShardResult(self.shard.order, self.counts, sizes)
        # Last, when .bin and .idx have been synced and renamed: a shard counts as finished by this file alone.
        write_atomically(done_path(self.folder, name), json.dumps(asdict(result)).encode())
        return result

    def _write(self, encoder: DocumentEncoder, writers: list[ShardWriter]) -> None:
        for part in self.shard.parts:
            reader = PartReader(part, self.task.read, self._malformed)
            for record in reader:
                try:
                    # All keys are encoded before any is written: a record that one key refuses is left out of every
                    # output, and the outputs stay aligned document by document.
                    documents = encoder.encode(record.value)
                except ValueError as error:
                    reader.reject(record.line, str(error))
                    continue
                self.counts.documents += 1
                for writer, document in zip(writers, documents, strict=True):
                    writer.add_document(document.pieces, document.lengths)

    def _malformed(self, error: MalformedRecord) -> None:
        if self.task.on_error == "raise":
            raise error
        self.counts.skipped += 1
        line = {"file": error.file, "line": error.line, "reason": error.reason}
        self._skipped.write(json.dumps(line, ensure_ascii=False) + "\n")


def output_files(prefix: Path) -> list[Path]:
    return [Path(f"{prefix}.bin"), Path(f"{prefix}.idx")]


@lru_cache(maxsize=1)
def encoder_of(task: Task) -> DocumentEncoder:
    """The encoder of a run, made once in each process.

    Raises DataError when the tokenizer is not the one that the run was planned with, because one of its
    files has changed since.
    """
    tokenizer = task.tokenizer.build()
    if tokenizer.fingerprint() != task.fingerprint:
        raise DataError("the tokenizer's files changed while the run was under way; start it again")
    return build_encoder(task, tokenizer)


def build_encoder(task: Task, tokenizer: Tokenizer) -> DocumentEncoder:
    """Raises ConfigError for a language without rules, and for a tokenizer without the id that is to be appended."""
    split = build_splitter(*task.splitter) if task.splitter else None
    return DocumentEncoder(tokenizer, task.json_keys, task.append_eod, split)


# -- writing: a shard is read once, to be joined -----------------------------------------------------
#
# Unlike `IndexedDatasetWriter` it takes tokens of many documents to the file at a time, writes no manifest, and
# keeps 4 bytes a sequence and 8 a document in memory, which a shard's size bounds.

FLUSH_TOKENS = 1 << 16
SUFFIX = ".tmp"


class ShardWriter:
    """Files get their names in `finish`. As a context manager it removes what it wrote unless that was called.

    vocab_size: ids from it on are refused (DataError): they would be other ids in a narrow dtype.
    Raises OSError as files do.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, vocab_size: int) -> None:
        self.prefix = prefix
        self.tokens = 0
        self._dtype, self._vocab_size = dtype, vocab_size
        self._pieces: list[np.ndarray] = []
        self._held = 0
        # C int and long long: 4 and 8 bytes an entry, as in the index; a list of Python integers takes over 30.
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._paths = [f"{prefix}.bin", f"{prefix}.idx"]
        # Unbuffered: `_flush` collects FLUSH_TOKENS itself, and a second buffer would only copy.
        self._bin = open(self._paths[0] + SUFFIX, "wb", buffering=0)  # noqa: SIM115

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After `finish` nothing is left under the temporary names, and the unlinks below find nothing.
        self._bin.close()
        for path in self._paths:
            with suppress(FileNotFoundError):
                os.unlink(path + SUFFIX)

    @property
    def sequences(self) -> int:
        return len(self._lengths)

    def add_document(self, pieces: Sequence[np.ndarray], lengths: Sequence[int]) -> None:
        """Append a document: the pieces' ids, one after another, are its sequences of the lengths given."""
        self._pieces.extend(pieces)
        self._lengths.extend(lengths)
        self._boundaries.append(len(self._lengths))
        self._held += sum(lengths)
        if self._held >= FLUSH_TOKENS:
            self._flush()

    def finish(self) -> None:
        """Put both files on the disk under their names."""
        self._flush()
        with open(self._paths[1] + SUFFIX, "wb", buffering=0) as index:
            for data in self._index():
                _write_all(index.fileno(), data)
            # Both files are on the disk before either gets its name; .done.json, which follows, then never refers to
            # lost data.
            os.fsync(index.fileno())
        os.fsync(self._bin.fileno())
        for path in self._paths:
            os.replace(path + SUFFIX, path)

    def _flush(self) -> None:
        if not self._pieces:
            return
        ids = np.concatenate(self._pieces)
        # Before the cast: astype(uint16) of 65536 gives 0 without an error.
        if len(ids) and (highest := int(ids.max())) >= self._vocab_size:
            raise DataError(f"the tokenizer gave the id {highest}, but says its vocabulary is {self._vocab_size}")
        _write_all(self._bin.fileno(), ids.astype(self._dtype, copy=False).data)
        self.tokens += len(ids)
        self._pieces.clear()
        self._held = 0

    def _index(self) -> list[bytes]:
        lengths = np.array(self._lengths, LENGTH)
        ends = np.cumsum(lengths, dtype=POINTER) * self._dtype.itemsize
        # Exclusive cumulative sum, as in IndexedDatasetWriter, but of a shard that fits in memory.
        pointers = ends - lengths * self._dtype.itemsize
        layout = Layout(self._dtype, len(lengths), len(self._boundaries))
        boundaries = np.array(self._boundaries, POINTER)
        return [layout.header(), lengths.tobytes(), pointers.astype(POINTER).tobytes(), boundaries.tobytes()]


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        # A raw write may take less than it was given (2 GiB at most, or up to a full disk), which buffered files hide.
        view = view[os.write(descriptor, view) :]
