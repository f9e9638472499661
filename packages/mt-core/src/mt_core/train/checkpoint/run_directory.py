"""The directory of a run: resolved configuration, metrics, log, checkpoints, and which of them is the best."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from mt_core.checkpoint_lookup import (
    BEST_FILE,
    CHECKPOINTS,
    LATEST,
    BestRecord,
    checkpoint_of_step,
    folder_of_step,
    newest_checkpoint,
    read_best,
)
from mt_core.config.loading import LoadedConfig
from mt_core.errors import CheckpointError, ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.reductions import any_over
from mt_core.paths import as_path, is_remote, sync_directory, write_whole

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"


def hf_folder(checkpoint: Path) -> Path:
    """Where the Hugging Face folder of a checkpoint lies (checkpoint.save_hf_interval)."""
    return checkpoint.parent / "hf" / checkpoint.name


class RunDirectory:
    """Paths of a run. `latest` in `checkpoints` holds the name of the newest complete checkpoint.

    checkpoints: replaces the `checkpoints` folder of the run directory; may be in an object store.
    """

    def __init__(self, path: str | Path, checkpoints: str | Path | None = None) -> None:
        self.path = as_path(path)
        self.checkpoints = self.path / CHECKPOINTS if checkpoints is None else as_path(checkpoints)

    def create(self) -> None:
        """Make the folders. Raises ConfigError when that is not possible."""
        _make_writable(self.path, "run directory", "--run-dir")
        # An object store has no folders to create.
        if not is_remote(self.checkpoints):
            _make_writable(self.checkpoints, "checkpoints", "--run-dir or checkpoint.save")

    def write_config(self, loaded: LoadedConfig) -> None:
        """The resolved configuration, which `mt train <path>` accepts unchanged, and the origin of each value."""
        _write(self.path / CONFIG_FILE, json.dumps(loaded.config.to_dict(), indent=2) + "\n")
        _write(self.path / "config-origins.json", json.dumps(dict(loaded.origins), indent=2) + "\n")

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / folder_of_step(iteration)

    def find(self, step: int | None = None) -> Path | None:
        """The checkpoint of `step`; without a step the newest complete one, or None when the run has no checkpoint.

        Raises CheckpointError when that of the step is not there, when the pointer to the newest cannot be read, and
        when it names a checkpoint that is not there.
        """
        return checkpoint_of_step(self.checkpoints, step) if step is not None else self.latest_checkpoint()

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, None when there is none. Raises CheckpointError as `find` does."""
        return newest_checkpoint(self.checkpoints)

    def set_latest(self, checkpoint: Path) -> None:
        """Point to a complete checkpoint, atomically."""
        _write(self.checkpoints / LATEST, checkpoint.name + "\n")
        # The rename of `latest` itself has to reach the disk: old checkpoints are removed after this.
        if not is_remote(self.checkpoints):
            sync_directory(self.checkpoints)

    def set_best(self, record: BestRecord) -> None:
        """Name the checkpoint of the best evaluation, atomically."""
        _write(self.checkpoints / BEST_FILE, json.dumps(asdict(record)) + "\n")


def _make_writable(folder: Path, what: str, key: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # mkdir does not object to a folder that exists and is read-only.
        if not os.access(folder, os.W_OK):
            # 13: EACCES.
            raise PermissionError(13, "not writable")
    except OSError as error:
        raise ConfigError(f"{what} {folder}: {error.strerror}; choose another with {key}") from error


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be written: {reason}; what was there before is untouched") from error


# -- the checkpoint of the best evaluation -----------------------------------------------------------


class BestCheckpoint:
    """Compares evaluations. Only the writer's record decides, so that all ranks save together."""

    def __init__(self, metric: str, directory: RunDirectory, ctx: ParallelContext, iteration: int) -> None:
        """iteration: at which the run begins; a record of a later one belongs to an abandoned run."""
        self.metric, self._directory, self._ctx = metric, directory, ctx
        best = read_best(directory.checkpoints)
        # Values of another metric do not compare.
        fits = best is not None and best.metric == metric and best.iteration <= iteration
        self.record = best if fits else None

    def improves(self, values: Mapping[str, float]) -> bool:
        """Whether the evaluation is better than all before it; one that is NaN never is. Collective over the world."""
        value = values[self.metric]
        before = math.nan if self.record is None else self.record.value
        # Losses are minimized, all other metrics maximized.
        better = value < before if self.metric.endswith("_loss") else value > before
        # A record of NaN, as there is before the first evaluation, compares with nothing: any number is better.
        better = better or (math.isnan(before) and not math.isnan(value))
        # Only the writer has read the file for certain; its answer is the one that all ranks get.
        return any_over(better and self._ctx.is_writer, self._ctx.world, self._ctx.device)

    def update(self, iteration: int, value: float) -> None:
        """Name the checkpoint of `iteration`, which is completely written."""
        name = self._directory.checkpoint(iteration).name
        self.record = BestRecord(checkpoint=name, iteration=iteration, metric=self.metric, value=value)
        if self._ctx.is_writer:
            self._directory.set_best(self.record)
