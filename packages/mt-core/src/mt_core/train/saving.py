"""Who writes a run's checkpoints: the training thread, or a thread of its own while training goes on.

One rank writes; the others take part in collecting what it writes. All have a `CheckpointWriter`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mt_core import retention
from mt_core.config.schema import CheckpointConfig
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost
from mt_core.specs import SaveCheckpoint
from mt_core.train.run_directory import RunDirectory

NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Committed:
    """A checkpoint that is complete on the disk, with `latest` pointing to it.

    seconds: that writing took. removed: older checkpoints. problem: why some could not be removed.
    """

    path: Path
    seconds: float = 0.0
    removed: tuple[Path, ...] = ()
    problem: str | None = None


class CheckpointWriter(Protocol):
    """Takes checkpoints to the disk, in the order in which they are given."""

    def write(self, path: Path, tensors: NamedTensors, metadata: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """When this returns, the tensors may change. Goes through `tensors`, which is collective, on every rank."""
        ...

    def committed(self) -> list[Committed]:
        """What became complete since the last call. Raises the error of a checkpoint that could not be written."""
        ...

    def finish(self) -> list[Committed]:
        """The same, after everything that was given has been written."""
        ...

    def close(self) -> list[str]:
        """After an error elsewhere: finish without raising. Returns a sentence on each checkpoint still in flight."""
        ...


class Commit:
    """Writes one checkpoint, then points `latest` to it, then removes what is not to be kept."""

    def __init__(
        self, save: SaveCheckpoint, directory: RunDirectory, config: CheckpointConfig, host: PluginHost
    ) -> None:
        self._save, self._directory, self._config = save, directory, config
        self._detectors = [spec.detect.load() for spec in host.checkpoint_loaders]

    def __call__(
        self, path: Path, tensors: NamedTensors, metadata: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> Committed:
        started = time.perf_counter()
        self._save(path, tensors, metadata, files)
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
        found = retention.checkpoints_in(latest.parent, lambda path: any(detect(path) for detect in self._detectors))
        return retention.superfluous(found, self._config.keep_last, self._config.keep_every, latest.name)


class WritesNow:
    """Training waits until the checkpoint is on the disk; one tensor at a time is collected."""

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self._done: list[Committed] = []

    def write(self, path: Path, tensors: NamedTensors, metadata: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        self._done.append(self._commit(path, tensors, metadata, files))

    def committed(self) -> list[Committed]:
        done, self._done = self._done, []
        return done

    def finish(self) -> list[Committed]:
        return self.committed()

    def close(self) -> list[str]:
        return []


class WritesInBackground:
    """Training waits until tensors are copied to host memory; a thread writes the copies, one checkpoint at a time.

    in_flight: checkpoints that may be copied and not yet written. A further one waits for the oldest.
    """

    def __init__(self, commit: Commit, in_flight: int) -> None:
        self._commit = commit
        self._free = [HostCopies() for _ in range(in_flight)]
        self._in_flight: deque[tuple[Path, HostCopies, Future[Committed]]] = deque()
        self._done: list[Committed] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mt-checkpoint")

    def write(self, path: Path, tensors: NamedTensors, metadata: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        if not self._free:
            self._settle_oldest()
        copies = self._free.pop()
        copies.fill(tensors)
        future = self._thread.submit(self._commit, path, copies.tensors.items(), metadata, files)
        self._in_flight.append((path, copies, future))

    def committed(self) -> list[Committed]:
        while self._in_flight and self._in_flight[0][2].done():
            self._settle_oldest()
        done, self._done = self._done, []
        return done

    def finish(self) -> list[Committed]:
        while self._in_flight:
            self._settle_oldest()
        return self.committed()

    def close(self) -> list[str]:
        self._thread.shutdown(wait=True)
        return [
            f"{path.name} was not written: {error}" if (error := future.exception()) else f"committed {path.name}"
            for path, _, future in self._in_flight
        ]

    def _settle_oldest(self) -> None:
        _, copies, future = self._in_flight.popleft()
        committed = future.result()
        self._free.append(copies)
        self._done.append(committed)


class TakesPart:
    """A rank that does not write; it cannot know when a checkpoint that is written in the background is complete."""

    def write(self, path: Path, tensors: NamedTensors, metadata: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        deque(tensors, maxlen=0)

    def committed(self) -> list[Committed]:
        return []

    def finish(self) -> list[Committed]:
        return []

    def close(self) -> list[str]:
        return []


class WaitsForWriter(TakesPart):
    """A rank that goes on when the writer has written, so that it knows that the checkpoint is there."""

    def __init__(self) -> None:
        self._done: list[Committed] = []

    def write(self, path: Path, tensors: NamedTensors, metadata: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        super().write(path, tensors, metadata, files)
        self._done.append(Committed(path))

    def committed(self) -> list[Committed]:
        done, self._done = self._done, []
        return done


class HostCopies:
    """Copies of a checkpoint's tensors in host memory, page-locked for tensors of a GPU.

    The memory is kept for the next checkpoint: to get it from the system again takes longer than to copy.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def fill(self, tensors: NamedTensors) -> None:
        """Take the values of `tensors`, of any device and stride, as they are now."""
        before, self.tensors = self.tensors, {}
        on_gpu = False
        for name, tensor in tensors:
            copy = before.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self.tensors[name] = copy.copy_(tensor.detach(), non_blocking=True)
            on_gpu = on_gpu or tensor.is_cuda
        if on_gpu:
            torch.cuda.synchronize()


def build_checkpoint_writer(
    config: CheckpointConfig, host: PluginHost, directory: RunDirectory | None, *, is_writer: bool
) -> CheckpointWriter:
    """The writer that the configuration asks for; directory: None for a run that writes nothing.

    Raises PluginError for an unknown checkpoint.ckpt_format and ConfigError for one that is no target of training.
    """
    if directory is None:
        return TakesPart()
    spec = host.checkpoint_savers.get(config.ckpt_format, key="checkpoint.ckpt_format")
    if spec.save is None:
        able = ", ".join(saver.name for saver in host.checkpoint_savers if saver.save is not None)
        raise ConfigError(
            f"checkpoint.ckpt_format={config.ckpt_format} is written by mt convert only; training writes {able}"
        )
    if config.keep_every is not None and config.keep_last is None:
        raise ConfigError(
            f"checkpoint.keep_every={config.keep_every}: without checkpoint.keep_last every checkpoint is kept; set "
            "checkpoint.keep_last, too"
        )
    if not is_writer:
        return TakesPart() if config.async_save else WaitsForWriter()
    commit = Commit(spec.save.load(), directory, config, host)
    return WritesInBackground(commit, config.async_in_flight) if config.async_save else WritesNow(commit)
