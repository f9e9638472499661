"""Running a task over files: bounded memory, any number of processes with the same bytes out, restartable.

An input file is read in batches; a task turns each batch into bytes for its output files and a report. Many files
are shared out among the processes one by one; of few files, the batches are. Either way the batches are the same
ones and are written in their order.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from mt_core.errors import ConfigError, DataError
from mt_data.corpora.outputs import atomic_writer
from mt_data.corpora.report import Report
from mt_data.corpora.state import Finished, reusable, save_finished, source_identity
from mt_data.preprocess.readers import MalformedRecord, Record, iter_records

BATCH_CHARACTERS = 2**20
BATCH_RECORDS = 512

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Reading:
    """How inputs are read. key: the field of a record that is looked at; it must hold text.

    on_error: "raise" stops at the first line that cannot be used, "skip" counts it as dropped.
    """

    key: str = "text"
    input_format: str = "auto"
    on_error: OnError = "raise"

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise ConfigError(f"--on-error {self.on_error!r} is not known; give {' or '.join(get_args(OnError))}")


class Batch(NamedTuple):
    """Records that follow one another in a file; `first` counts the usable records before them in it."""

    records: list[Record]
    first: int


class BatchResult(NamedTuple):
    """chunks: for each output of the job, the bytes to append."""

    chunks: tuple[bytes, ...]
    report: Report


RunBatch = Callable[[Batch], BatchResult]


class Task(Hashable, Protocol):
    """A small, hashable, picklable description of work; each process opens it once."""

    @property
    def reading(self) -> Reading: ...

    def identity(self) -> dict[str, Any]:
        """Everything but the input that the output depends on, as JSON values."""

    def open(self) -> RunBatch:
        """Load what the work needs."""


@dataclass(frozen=True)
class Job:
    """One input and its outputs, in the order of `BatchResult.chunks`, of which the last ones may be left out.

    name: its name in the state of `folder`.
    """

    source: Path
    name: str
    folder: Path
    outputs: tuple[Path, ...]


@dataclass(frozen=True)
class JobResult:
    job: Job
    report: Report
    reused: bool


@dataclass(frozen=True)
class Running:
    """workers: processes. overwrite: make again what was made otherwise. advance: called with their counts."""

    workers: int = 1
    overwrite: bool = False
    advance: Callable[[int, int], None] = field(default=lambda documents, files: None)


def run_jobs(task: Task, jobs: Sequence[Job], running: Running) -> list[JobResult]:
    """Do the jobs that an earlier run has not finished; the results are in the order of the jobs."""
    results = finished_jobs(task, jobs, running.overwrite)
    for result in results.values():
        running.advance(result.report.read, 1)
    left = [job for job in jobs if job not in results]
    for job, report in zip(left, _run_left(task, left, running), strict=True):
        results[job] = JobResult(job, report, reused=False)
    return [results[job] for job in jobs]


def finished_jobs(task: Task, jobs: Sequence[Job], overwrite: bool) -> dict[Job, JobResult]:
    """What an earlier run finished. Raises ConfigError where it was made otherwise, unless `overwrite`."""
    made_by, results = task.identity(), dict[Job, JobResult]()
    for job in jobs:
        report = reusable(job.folder, job.name, source_identity(job.source), made_by, job.outputs, overwrite)
        if report is not None:
            results[job] = JobResult(job, report, reused=True)
    return results


def _run_left(task: Task, jobs: Sequence[Job], running: Running) -> Iterator[Report]:
    if running.workers == 1 or not jobs:
        for job in jobs:
            yield _run_job(task, job, map, running.advance)
    # A file for each process: only file names and reports pass between processes.
    elif len(jobs) >= running.workers:
        with process_pool(running.workers) as executor:
            for report in ordered_map(executor, partial(_run_job, task), jobs, ahead=len(jobs)):
                running.advance(report.read, 1)
                yield report
    else:
        with process_pool(running.workers) as executor:
            # Fewer files than processes: this process reads and writes, and the batches are sent to the others.
            shared = partial(_map_batches, executor, 2 * running.workers)
            for job in jobs:
                yield _run_job(task, job, shared, running.advance)


def _map_batches(executor: Executor, ahead: int, run: RunBatch, batches: Iterable[Batch]) -> Iterator[BatchResult]:
    return ordered_map(executor, run, batches, ahead)


def _run_job(
    task: Task,
    job: Job,
    mapper: Callable[[RunBatch, Iterable[Batch]], Iterable[BatchResult]] = map,
    advance: Callable[[int, int], None] = lambda documents, files: None,
) -> Report:
    # Taken before reading and compared after it, inside of the `with`: a difference raises, and no output gets its
    # name.
    source, report = source_identity(job.source), Report()
    # Before the work is opened: what is recorded is never newer than the files that the work was made of.
    made_by = task.identity()
    run_batch = partial(_run_batch, task, json.dumps(made_by))
    with ExitStack() as stack:
        streams = [stack.enter_context(atomic_writer(path)) for path in job.outputs]
        for result in mapper(run_batch, read_batches(job.source, task.reading, report)):
            for stream, chunk in zip(streams, result.chunks, strict=False):  # an output may be unwanted
                stream.write(chunk)
            report.merge(result.report)
            advance(result.report.read, 0)
        if source_identity(job.source) != source:
            raise DataError(f"{job.source} changed while it was read; run again when it is complete")
    sizes = {str(path): path.stat().st_size for path in job.outputs}
    # After the outputs have their names; a kill in between makes them again.
    save_finished(job.folder, job.name, Finished(source, made_by, sizes, report))
    advance(0, 1)
    return report


def _run_batch(task: Task, identity: str, batch: Batch) -> BatchResult:
    return _opened(task, identity)(batch)


def opened(task: Task) -> RunBatch:
    """The work of a task, loaded once in a process: that costs much more than a batch."""
    return _opened(task, json.dumps(task.identity()))


# identity: with the content of the files that a task only names, which may change between two runs of a process.
@lru_cache(maxsize=2)
def _opened(task: Task, identity: str) -> RunBatch:
    return task.open()


def read_batches(path: Path, reading: Reading, report: Report) -> Iterator[Batch]:
    """The usable records of a file in batches that depend on the file alone; the others go into the report."""

    def on_malformed(error: MalformedRecord, reason: str = "malformed_line") -> None:
        if reading.on_error == "raise":
            raise error
        report.drop(reason, f"{error.file}:{error.line}: {error.reason}")

    records: list[Record] = []
    characters = first = 0
    for record in iter_records(path, on_malformed=on_malformed, input_format=reading.input_format):
        text = record.value.get(reading.key)
        if not isinstance(text, str):
            on_malformed(MalformedRecord(record.file, record.line, _no_text(record, reading.key)), "no_text")
            continue
        records.append(record)
        characters += len(text)
        if characters >= BATCH_CHARACTERS or len(records) == BATCH_RECORDS:
            yield Batch(records, first)
            first, records, characters = first + len(records), [], 0
    if records:
        yield Batch(records, first)


def _no_text(record: Record, key: str) -> str:
    if key in record.value:
        return (
            f"key {key!r} holds {type(record.value[key]).__name__}, not text; name another key or use --on-error skip"
        )
    keys = ", ".join(map(repr, record.value)) or "none"
    return f"has no key {key!r} (its keys: {keys}); name the key that holds the text, or use --on-error skip"


# -- process pool, which ends with its parent and answers in order -----------------------------------

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def process_pool(workers: int) -> Iterator[Executor]:
    """Fresh processes (not forks, which inherit locks of threads). Raises DataError when one of them dies."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, most often for lack of memory; finished files are kept, "
            "so run the same command again, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """A worker waiting for work would outlive a parent that was killed."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # The main thread of the worker blocks on the queue of tasks and would not end otherwise.
        os._exit(1)


def ordered_map(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """`map` with at most `ahead` items under way, so that memory does not depend on how many there are."""
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(executor.submit(function, item))
        # The oldest first, whichever is done: outputs are written in the order of the inputs.
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
