"""Cuts compressed files into chunks of whole lines while they are read, ahead of those who work on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from queue import Full, Queue
from threading import Event, Thread
from typing import Generic, TypeVar

from mt_data.preprocess.formats import detect_format, open_with_raw
from mt_data.preprocess.parts import Lines, ReadOptions, Shard
from mt_data.preprocess.plan import CutStream
from mt_data.preprocess.readers import skip_line

T = TypeVar("T")


def cut_stream(job: CutStream, chunk_bytes: int, options: ReadOptions) -> Iterator[Shard]:
    """The file's lines in chunks of `chunk_bytes`, each up to the end of its last line.

    Of a line that is too long only so much is kept that it will be found too long.
    """
    path = job.path
    chunk, first_line, read_before = 0, 1, 0
    with open_with_raw(path, detect_format(path, options.input_format)) as (stream, raw):
        while data := stream.read(chunk_bytes):
            if not data.endswith(b"\n"):
                data += stream.readline(options.max_line_bytes + 1)
            if not data.endswith(b"\n") and skip_line(stream):
                data += b"\n"
            read = raw.tell()
            lines = Lines(str(path), first_line, data)
            yield Shard((job.number, chunk), (lines,), read - read_before)
            chunk, first_line, read_before = chunk + 1, first_line + data.count(b"\n"), read


def interleave(generators: Iterable[Generator[T]], width: int) -> Generator[T]:
    """Items of several generators, `width` of them read ahead at once, each in a thread of its own.

    The first error of any ends it. Closing the generator ends the threads.
    """
    waiting = iter(generators)
    active: deque[_ReadAhead[T]] = deque()
    try:
        while True:
            while len(active) < width and (following := next(waiting, None)) is not None:
                active.append(_ReadAhead(following))
            if not active:
                return
            ahead = active.popleft()
            item = ahead.take()
            if item is not None:
                active.append(ahead)
                yield item
    finally:
        for ahead in active:
            ahead.close()


class _ReadAhead(Generic[T]):
    """Runs a generator in a thread, one item ahead."""

    def __init__(self, generator: Generator[T]) -> None:
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
                self._queue.put(item, timeout=0.1)
                return
            except Full:
                continue
