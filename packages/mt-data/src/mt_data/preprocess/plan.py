"""Cuts a corpus into jobs: shards that can be read by themselves, and compressed files cut while they are read.

The cut depends on the files and the options alone, so that an interrupted run can be continued with another
number of workers, and so that machines which do a part each agree on what the parts are.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Generic, TypeVar

from mt_core.errors import DataError
from mt_core.paths import is_remote
from mt_data.preprocess.encodings import UTF8
from mt_data.preprocess.formats import examine_format, open_with_raw
from mt_data.preprocess.parts import ByteRange, Lines, Part, ReadOptions, RowGroups, Shard, WholeFile
from mt_data.preprocess.readers import skip_line

# The size of a shard bounds what an interruption costs (the shards under way), the memory of a worker's index and the
# granularity of the progress bar; the number of shards bounds the files in the partial folder.
MIB = 2**20
SHARDS_OF_A_CORPUS = 256
SHARDS_OF_A_MACHINE = 8
"""At least, of a corpus that is small for the machines that share it."""
MIN_SHARD_BYTES = MIB
MAX_SHARD_BYTES = 32 * MIB
COMPRESSION = 4
"""What compressed text is taken to grow by, to compare it with a shard's size."""
LISTED_FILES = 8
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InputFile:
    """An input as it was when the run was planned."""

    path: Path
    size: int
    changed: int | str
    """When it was changed, in ns; of an object of a store its version."""


@dataclass(frozen=True)
class CutStream:
    """A compressed file too big for one shard: one process reads it and hands out its lines by the chunk."""

    number: int
    path: Path
    size: int

    @property
    def input_bytes(self) -> int:
        return self.size


Job = Shard | CutStream


def examine(paths: Iterable[Path]) -> list[InputFile]:
    """Size and time of each input; DataError for one that is gone."""
    files = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
        files.append(InputFile(path, stat.st_size, _version(path) if is_remote(path) else stat.st_mtime_ns))
    return files


def report_empty(files: Sequence[InputFile]) -> None:
    """Log the names of files without a byte; DataError where all files are."""
    # Compressed files and Parquet without a byte are damaged: who reads them says so.
    empty = [str(file.path) for file in files if not file.size and file.path.suffix not in (".gz", ".zst", ".parquet")]
    if not empty:
        return
    names = ", ".join(empty[:LISTED_FILES]) + (f" and {len(empty) - LISTED_FILES} more" if empty[LISTED_FILES:] else "")
    if len(empty) == len(files):
        raise DataError(f"there is no text to read, every file is empty: {names}; fill them, or name other files")
    log.warning("empty files give no tokens: %s; fill them, or remove them from the input", names)


def _version(path: Path) -> str:
    """What differs between two versions of an object: its tag, its time, or what else the store reports."""
    return str(path.fs.ukey(path.path))  # type: ignore[attr-defined]


def default_shard_bytes(files: Iterable[InputFile], machines: int = 1) -> int:
    """Small enough for many workers, and for each of many machines to get its share; else as large as is useful."""
    total = sum(file.size for file in files)
    size = min(max(total // SHARDS_OF_A_CORPUS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    return size if machines == 1 else max(1, min(size, total // (machines * SHARDS_OF_A_MACHINE)))


# Example, shard_bytes = 10: files a.jsonl (4 bytes), b.jsonl (25), c.jsonl.gz (3, taken as 12 of text), d.jsonl (2)
#   job 0  Shard      a[0:4]              b[0:10] does not fit behind it
#   job 1  Shard      b[0:10]
#   job 2  Shard      b[10:20]
#   job 3  Shard      b[20:25]
#   job 4  CutStream  c                   chunks (4, 0), (4, 1), ... are cut while it is read
#   job 5  Shard      d[0:2]
# Results sorted by (job, chunk) are in the order of the input, whatever the order in which they finished.
def plan_jobs(
    files: Iterable[InputFile],
    shard_bytes: int,
    input_format: str = "auto",
    cut_streams: bool = True,
    encodings: tuple[str, ...] = UTF8,
) -> list[Job]:
    """Jobs in the order of the output. Small parts are put together, big files cut.

    cut_streams: False makes a compressed file of any size one shard, for executors that cannot be fed.
    """
    jobs: list[Job] = []
    parts: list[Part] = []
    weights: list[int] = []
    held = 0  # bytes of text in `parts`, roughly

    def close() -> None:
        nonlocal held
        if parts:
            # A shard of the plan is chunk 0 of its job; only streams have further chunks.
            jobs.append(Shard((len(jobs), 0), tuple(parts), sum(weights)))
        parts.clear()
        weights.clear()
        held = 0

    for piece, weight, text_bytes in _pieces(files, shard_bytes, input_format, cut_streams, encodings):
        if held and held + text_bytes > shard_bytes:
            close()
        # A stream is a job of its own: what was collected before it must come before it in the output.
        if isinstance(piece, InputFile):
            close()
            jobs.append(CutStream(len(jobs), piece.path, piece.size))
            continue
        parts.append(piece)
        weights.append(weight)
        held += text_bytes
    close()
    return jobs


def share_of_machine(jobs: list[Job], index: int, count: int) -> list[Job]:
    """The jobs of machine `index` of `count`: a run of neighbours, all machines getting about as many bytes."""
    total = sum(max(job.input_bytes, 1) for job in jobs)
    mine, before = [], 0
    for job in jobs:
        weight = max(job.input_bytes, 1)
        # The machine in whose part of [0, total) the middle of the job lies: (before + weight / 2) * count / total, in
        # integers, so that all machines round alike. Each job falls to exactly one machine.
        if (2 * before + weight) * count // (2 * total) == index:
            mine.append(job)
        before += weight
    return mine


def _pieces(
    files: Iterable[InputFile], shard_bytes: int, input_format: str, cut_streams: bool, encodings: tuple[str, ...]
) -> Iterator[tuple[Part | InputFile, int, int]]:
    """(part, or file to cut while it is read; its bytes on the disk; its bytes of text, roughly)."""
    for file in files:
        detected = examine_format(file.path, input_format, encodings)
        path = str(file.path)
        if detected.kind == "parquet":
            yield from _row_groups(file, shard_bytes)
        elif detected.divisible:
            # Cut at bytes without a look at the content; PartReader moves each cut to the next beginning of a line.
            for begin in range(0, file.size, shard_bytes):
                end = min(begin + shard_bytes, file.size)
                yield ByteRange(path, begin, end), end - begin, end - begin
        # Plain text is one document, compressed or not, and cannot be cut; nor can lines of UTF-16.
        elif detected.compression is None or detected.kind == "text":
            yield WholeFile(path), file.size, file.size
        elif cut_streams and file.size * COMPRESSION > shard_bytes:
            yield file, file.size, file.size * COMPRESSION
        else:
            yield WholeFile(path), file.size, file.size * COMPRESSION


def _row_groups(file: InputFile, shard_bytes: int) -> Iterator[tuple[Part, int, int]]:
    """Neighbouring row groups together, up to a shard's size of text."""
    from mt_data.preprocess.formats import open_parquet

    with open_parquet(file.path) as opened:
        metadata = opened.metadata
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    weights = [file.size * count // max(sum(rows), 1) for count in rows]
    held: list[int] = []
    for number, weight in enumerate(weights):
        size = sum(weights[group] for group in held)
        if held and (size + weight) * COMPRESSION > shard_bytes:
            yield RowGroups(str(file.path), tuple(held)), size, size * COMPRESSION
            held = []
        held.append(number)
    if held:
        size = sum(weights[group] for group in held)
        yield RowGroups(str(file.path), tuple(held)), size, size * COMPRESSION


# -- compressed files, cut into chunks of whole lines while they are read ----------------------------

T = TypeVar("T")


# A gzip or Zstandard stream can be decompressed from its start only, by one thread. That is several times faster than
# encoding, so one reader keeps many workers busy (run.WORKERS_PER_STREAM).
def cut_stream(job: CutStream, chunk_bytes: int, options: ReadOptions) -> Iterator[Shard]:
    """The file's lines in chunks of `chunk_bytes`, each up to the end of its last line.

    Of a line that is too long only so much is kept that it will be found too long.
    """
    path = job.path
    chunk, first_line, read_before = 0, 1, 0
    input_format = examine_format(path, options.input_format, options.encodings)
    with open_with_raw(path, input_format) as (stream, raw):
        while data := stream.read(chunk_bytes):
            # The chunk ended within a line: the rest of it is added, at most one byte more than a line may have.
            if not data.endswith(b"\n"):
                data += stream.readline(options.max_line_bytes + 1)
            # Still no newline: the line is too long (or the file's last, where skip_line passes nothing). Its rest is
            # dropped and a newline put in its place, so that the numbers of the lines after it stay right; iter_lines
            # then rejects it.
            if not data.endswith(b"\n") and skip_line(stream):
                data += b"\n"
            # Compressed bytes, for the progress; the decompressor reads ahead of the lines by a buffer.
            read = raw.tell()
            lines = Lines(str(path), first_line, data, input_format.encodings)
            yield Shard((job.number, chunk), (lines,), read - read_before)
            chunk, first_line, read_before = chunk + 1, first_line + data.count(b"\n"), read


def interleave(generators: Iterable[Generator[T]], width: int) -> Generator[T]:
    """Items of several generators, `width` of them read ahead at once, each in a thread of its own.

    The first error of any ends it. Closing the generator ends the threads.
    """
    waiting = iter(generators)
    # A rotation: with width 2 and files A, B, C the order is A0 B0 A1 B1 ... until one ends, then C takes its place.
    # The order of results does not matter, since each shard carries its own (job, chunk).
    active: deque[_ReadAhead[T]] = deque()
    try:
        while True:
            while len(active) < width and (following := next(waiting, None)) is not None:
                active.append(_ReadAhead(following))
            if not active:
                return
            ahead = active.popleft()
            item = ahead.take()
            # None: the end of this generator; its thread has returned.
            if item is not None:
                active.append(ahead)
                yield item
    finally:
        for ahead in active:
            ahead.close()


class _ReadAhead(Generic[T]):
    """Runs a generator in a thread, one item ahead."""

    def __init__(self, generator: Generator[T]) -> None:
        # One item in the queue and one in the hands of the thread: two chunks of text in memory for each stream.
        self._queue: Queue[T | BaseException | None] = Queue(maxsize=1)
        self._stop = Event()
        self._thread = Thread(target=self._run, args=(generator,), daemon=True, name="read-ahead")
        self._thread.start()

    def take(self) -> T | None:
        """The next item; None at the end. Raises what the generator raised."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self, generator: Generator[T]) -> None:
        end: BaseException | None = None
        try:
            # Closed by the thread that runs it: a generator cannot be closed while it is running in another one.
            with closing(generator):
                for item in generator:
                    self._put(item)
                    if self._stop.is_set():
                        return
        except BaseException as error:
            end = error
        self._put(end)

    def _put(self, item: T | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                # With a time-out, since `close` cannot wake a thread that waits in put for a consumer which has gone.
                self._queue.put(item, timeout=0.1)
                return
            except Full:
                continue
