"""Cuts compressed files into chunks of whole lines while they are read, ahead of those who work on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from queue import Full, Queue
from threading import Event, Thread
from typing import Generic, TypeVar

from mt_data.preprocess.formats import examine_format, open_with_raw
from mt_data.preprocess.parts import Lines, ReadOptions, Shard
from mt_data.preprocess.plan import CutStream
from mt_data.preprocess.readers import skip_line

T = TypeVar("T")


# A gzip or Zstandard stream can be decompressed from its start only, by one thread. That is several times faster than
# encoding, so one reader keeps many workers busy (run.WORKERS_PER_STREAM).
def cut_stream(job: CutStream, chunk_bytes: int, options: ReadOptions) -> Iterator[Shard]:
    """The file's lines in chunks of `chunk_bytes`, each up to the end of its last line.

    Of a line that is too long only so much is kept that it will be found too long.
    """
    path = job.path
    chunk, first_line, read_before = 0, 1, 0
    found = examine_format(path, options.input_format, options.encodings)
    with open_with_raw(path, found) as (stream, raw):
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
            lines = Lines(str(path), first_line, data, found.encodings)
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
