"""Writing a run's checkpoints.

`Method` says which rank writes what: with a format that has `save_sharded` every rank writes its shards; with one that
has `save` the other ranks send their shards to the first rank, which writes whole tensors. `CheckpointWriter` says
when: in the training thread, or in a background thread during the next steps.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mt_core import retention
from mt_core.checkpoint_lookup import best_name
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CHECKPOINT_SAVERS, Fragment, SaveCheckpoint, ShardedSave
from mt_core.config.schema import CheckpointConfig
from mt_core.errors import CheckpointError, ConfigError
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.parallel.first_rank import on_first_rank, raise_on_all_ranks
from mt_core.parallel.reductions import any_over
from mt_core.plugins import PluginHost
from mt_core.tensor_slice import TensorSlice
from mt_core.train.checkpoint.local_shards import identity, whole_fragment
from mt_core.train.checkpoint.run_directory import RunDirectory, hf_folder
from mt_core.train.checkpoint.write_plan import WritePlan, collect

T = TypeVar("T")
ROUND_SECONDS = 1.0
"""How often ranks that wait for their threads look whether another one has failed."""


@dataclass(frozen=True)
class CheckpointContents:
    """Contents of one checkpoint. fragments: this rank's shards. metadata and files: the same on all ranks."""

    fragments: list[Fragment]
    metadata: Mapping[str, Any]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Committed:
    """A checkpoint that is completely written, with `latest` pointing to it.

    seconds: duration of the write. removed: older checkpoints that were deleted. problem: why some could not be.
    """

    path: Path
    seconds: float = 0.0
    removed: tuple[Path, ...] = ()
    problem: str | None = None


class Commit:
    """Points `latest` to a written checkpoint, then removes the checkpoints that are not kept."""

    def __init__(self, directory: RunDirectory, config: CheckpointConfig, host: PluginHost) -> None:
        self._directory, self._config = directory, config
        self._detectors = [spec.detect.load() for spec in host[CHECKPOINT_LOADERS]]

    def __call__(self, path: Path, started: float) -> Committed:
        """started: start of the write, by time.perf_counter."""
        # First point to the new checkpoint, then remove old ones: whenever the process ends, `latest` names a complete
        # one.
        self._directory.set_latest(path)
        seconds = time.perf_counter() - started
        removed: list[Path] = []
        try:
            for old in self._superfluous(path):
                retention.remove(old)
                removed.append(old)
        except CheckpointError as error:  # the new one is safe, so that training can go on
            return Committed(path, seconds, tuple(removed), str(error))
        return Committed(path, seconds, tuple(removed))

    def _superfluous(self, latest: Path) -> list[Path]:
        if self._config.keep_last is None:
            return []
        # Only folders that a loader recognizes are candidates for removal.
        checkpoints = retention.checkpoints_in(
            latest.parent, lambda path: any(detect(path) for detect in self._detectors)
        )
        # Later checkpoints belong to an abandoned run: this one resumed from an earlier step. They are not counted.
        checkpoints = [path for path in checkpoints if retention.iteration_of(path) <= retention.iteration_of(latest)]
        kept = (latest.name, best_name(latest.parent))
        named = retention.superfluous(checkpoints, self._config.keep_last, self._config.keep_every, kept)
        return [path for path in named if not self._awaits_export(path)]

    def _awaits_export(self, path: Path) -> bool:
        """Whether a Hugging Face folder is still to be made from this checkpoint."""
        interval = self._config.save_hf_interval
        return interval is not None and retention.iteration_of(path) % interval == 0 and not hf_folder(path).is_dir()


# ---------------------------------------------------------------------------------------------------
# Which rank writes what
# ---------------------------------------------------------------------------------------------------

Write = Callable[[Iterable[Fragment]], Committed | None]
"""Writes this rank's data. Returns None on ranks that do not learn when the checkpoint is complete."""


class Method(Protocol):
    """Collective over all ranks."""

    def begin(self, path: Path, contents: CheckpointContents) -> tuple[Iterable[Fragment], Write]:
        """The fragments that this rank writes, and the function that writes them. Iterating over the fragments is
        collective too; the function may be called in another thread."""
        ...


class ShardedMethod:
    """Every rank writes a part of its shards, so that each element is written once; the first rank commits."""

    def __init__(self, saver: ShardedSave, commit: Commit, ctx: ParallelContext) -> None:
        self._saver, self._commit, self._ctx = saver, commit, ctx
        self._plan = WritePlan()

    def begin(self, path: Path, contents: CheckpointContents) -> tuple[list[Fragment], Write]:
        started = time.perf_counter()
        world = self._ctx.world
        # The first rank creates the place that all ranks write to, and its name is sent to them.
        place = on_first_rank(partial(self._saver.begin, path), world)

        def write(fragments: Iterable[Fragment]) -> Committed | None:
            self._saver.write(path, place, world.rank, world.size, fragments, contents.metadata, contents.files)
            # The saver's write() of the first rank returns when the parts of all ranks are there.
            return self._commit(path, started) if self._ctx.is_writer else None

        # Collectives run here, in the training thread; `write` has none, as it may run beside those of the next steps.
        return self._plan.share(contents.fragments, self._ctx), write


class WholeMethod:
    """The first rank writes whole tensors, one at a time, as the others send them."""

    def __init__(self, save: SaveCheckpoint, commit: Commit, ctx: ParallelContext) -> None:
        self._save, self._commit, self._ctx = save, commit, ctx

    def begin(self, path: Path, contents: CheckpointContents) -> tuple[Iterator[Fragment], Write]:
        def write(fragments: Iterable[Fragment]) -> Committed | None:
            if not self._ctx.is_writer:
                # Iterating sends this rank's shards. A deque of length 0 consumes an iterator and keeps nothing.
                deque(fragments, maxlen=0)
                return None
            started = time.perf_counter()
            tensors = ((fragment.name, fragment.tensor()) for fragment in fragments)
            try:
                self._save(path, tensors, contents.metadata, contents.files)
            finally:
                # What a saver that failed has not taken: the other ranks wait until all that they send is received.
                deque(fragments, maxlen=0)
            return self._commit(path, started)

        return self._collected(contents.fragments), write

    def _collected(self, fragments: list[Fragment]) -> Iterator[Fragment]:
        for name, tensor in collect(fragments, self._ctx):
            if self._ctx.is_writer:
                yield whole_fragment(name, tensor)


# ---------------------------------------------------------------------------------------------------
# When it is written
# ---------------------------------------------------------------------------------------------------


class CheckpointWriter(Protocol):
    """Writes checkpoints in the order in which they are submitted. Every rank has one."""

    def write(self, path: Path, contents: CheckpointContents) -> None:
        """Submit a checkpoint. The tensors may change when this returns. Raises the error of this one or of one before
        it that any rank could not write. Collective."""
        ...

    def committed(self) -> list[Committed]:
        """The checkpoints completed since the last call."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not write a checkpoint; `write` and `finish` raise its error on all ranks."""
        ...

    def finish(self) -> list[Committed]:
        """Wait until all submitted checkpoints have been written, then return `committed`. Collective.

        Raises the error of a checkpoint that any rank could not write.
        """
        ...

    def close(self) -> list[str]:
        """After an error elsewhere: finish without raising. Returns a message for each checkpoint still in flight."""
        ...


class SyncCheckpointWriter:
    """Synchronous: training waits until the checkpoint is written.

    ranks: those that wait until the first of them has committed, and raise its error.
    """

    def __init__(self, method: Method, ranks: Axis) -> None:
        self._method, self._ranks = method, ranks
        self._done: list[Committed] = []

    def write(self, path: Path, contents: CheckpointContents) -> None:
        fragments, write = self._method.begin(path, contents)
        if self._ranks.rank == 0:
            committed = on_first_rank(lambda: write(fragments), self._ranks)
        else:
            try:
                write(fragments)
            finally:
                # Also after an error of this rank: the first one waits for all.
                committed = on_first_rank(lambda: None, self._ranks)
        self._done.append(committed or Committed(path))

    def committed(self) -> list[Committed]:
        done, self._done = self._done, []
        return done

    @property
    def has_failed(self) -> bool:
        return False

    def finish(self) -> list[Committed]:
        return self.committed()

    def close(self) -> list[str]:
        return []


class _WritingThread:
    """One thread, so that checkpoints are committed in the order of their steps. The end of the process waits for it,
    unless it was abandoned."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # daemon: no other thread can be abandoned.
        self._thread = Thread(target=self._run, name="mt-checkpoint", daemon=True)
        self._thread.start()
        atexit.register(self.finish)

    def submit(self, write: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(write(*arguments))
            except Exception as error:
                future.set_exception(error)

        self._tasks.put(task)
        return future

    def finish(self) -> None:
        """Wait until everything submitted is done."""
        self.abandon()
        self._tasks.put(None)
        self._thread.join()

    def abandon(self) -> None:
        """Let the process end without it."""
        atexit.unregister(self.finish)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class AsyncCheckpointWriter:
    """Asynchronous: training waits for the copies to host memory only; a thread writes one checkpoint at a time.

    in_flight: maximum number of copied checkpoints not yet written. A further one waits for the oldest.
    """

    def __init__(self, method: Method, in_flight: int, ctx: ParallelContext) -> None:
        self._method, self._ctx = method, ctx
        # The bound on host memory: a checkpoint in flight holds one set of copies.
        self._free = [HostCopies() for _ in range(in_flight)]
        self._in_flight: deque[tuple[Path, HostCopies, Future[Committed | None]]] = deque()
        self._done: list[Committed] = []
        # Not yet raised.
        self._failed: deque[tuple[Path, Exception]] = deque()
        self._thread = _WritingThread()
        self._has_raised = False

    def write(self, path: Path, contents: CheckpointContents) -> None:
        self._wait_until(lambda: bool(self._free))
        copies = self._free.pop()
        fragments, write = self._method.begin(path, contents)
        # fill() runs here: the next step changes the tensors.
        self._in_flight.append((path, copies, self._thread.submit(write, copies.fill(fragments))))

    def committed(self) -> list[Committed]:
        self._settle()
        done, self._done = self._done, []
        return done

    @property
    def has_failed(self) -> bool:
        self._settle()
        return bool(self._failed)

    def finish(self) -> list[Committed]:
        self._wait_until(lambda: not self._in_flight)
        return self.committed()

    def close(self) -> list[str]:
        # After the error of another rank the first rank's thread may wait for ever for that rank's report.
        if self._has_raised:
            self._thread.abandon()
        else:
            self._thread.finish()
        done = [f"committed {committed.path.name}" for committed in self.committed()]
        return done + [f"{path.name} was not written: {error}" for path, error in self._failed]

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Return when `ready` is true on all ranks. Raises an error of any of them. Collective."""
        # In rounds: the thread of the first rank waits for the others, and would wait for ever for one that failed.
        while True:
            self._settle()
            self._raise_first()
            if not any_over(not ready(), self._ctx.world, self._ctx.device):
                return
            wait([future for _, _, future in self._in_flight], ROUND_SECONDS, FIRST_COMPLETED)

    def _raise_first(self) -> None:
        """Raise the error of the first rank that has one. Collective."""
        rank_error = self._failed[0][1] if self._failed else None
        try:
            raise_on_all_ranks(rank_error, self._ctx.world)
        except Exception as error:
            self._has_raised = True
            if error is rank_error:
                self._failed.popleft()
            raise

    def _settle(self) -> None:
        """Take what the thread has done."""
        while self._in_flight and self._in_flight[0][2].done():
            path, copies, future = self._in_flight.popleft()
            self._free.append(copies)
            try:
                committed = future.result()
            except Exception as error:
                self._failed.append((path, error))
            else:
                self._done += [committed] if committed is not None else []


class NullCheckpointWriter:
    """For a run without a directory."""

    def write(self, path: Path, contents: CheckpointContents) -> None: ...

    def committed(self) -> list[Committed]:
        return []

    @property
    def has_failed(self) -> bool:
        return False

    def finish(self) -> list[Committed]:
        return []

    def close(self) -> list[str]:
        return []


class HostCopies:
    """Copies of fragments in host memory, pinned for tensors of a GPU.

    The memory is reused for the next checkpoint: allocating and pinning it takes longer than the copy.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, TensorSlice], Tensor] = {}

    @torch.no_grad()
    def fill(self, fragments: Iterable[Fragment]) -> list[Fragment]:
        """Copies of the fragments' current values. The sources may be on any device and have any strides."""
        before, self._copies = self._copies, {}
        copied, on_gpu = [], False
        for fragment in fragments:
            tensor = fragment.tensor().detach()
            # Fragments come in the same slices at each checkpoint, so the copies of the last one fit.
            copy = before.get((fragment.name, fragment.tensor_slice))
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._copies[fragment.name, fragment.tensor_slice] = copy.copy_(tensor, non_blocking=True)
            copied.append(replace(fragment, tensor=partial(identity, copy)))
            on_gpu = on_gpu or tensor.is_cuda
        # Copies to pinned memory are asynchronous: one wait for all of them.
        if on_gpu:
            torch.cuda.synchronize()
        return copied


def build_checkpoint_writer(
    config: CheckpointConfig, host: PluginHost, directory: RunDirectory | None, ctx: ParallelContext
) -> CheckpointWriter:
    """The configured writer. directory: None for a run that writes nothing.

    Raises PluginError for an unknown checkpoint.ckpt_format and ConfigError for one that training cannot write.
    """
    if directory is None:
        return NullCheckpointWriter()
    method = _method(config, host, Commit(directory, config, host), ctx)
    if not config.async_save:
        return SyncCheckpointWriter(method, ctx.world)
    return AsyncCheckpointWriter(method, config.async_in_flight, ctx)


def _method(config: CheckpointConfig, host: PluginHost, commit: Commit, ctx: ParallelContext) -> Method:
    spec = host[CHECKPOINT_SAVERS].get(config.ckpt_format, key="checkpoint.ckpt_format")
    # Preferred: no tensor is sent to another rank.
    if spec.save_sharded is not None:
        return ShardedMethod(spec.save_sharded.load()(), commit, ctx)
    if spec.save is not None:
        return WholeMethod(spec.save.load(), commit, ctx)
    able = ", ".join(saver.name for saver in host[CHECKPOINT_SAVERS] if saver.save or saver.save_sharded)
    raise ConfigError(
        f"checkpoint.ckpt_format={config.ckpt_format} is written by mt convert only; training writes {able}"
    )
