"""The folder of a run: resolved configuration, metrics, log, checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mt_core.config.loading import LoadedConfig
from mt_core.errors import CheckpointError, ConfigError
from mt_core.paths import as_path, children, is_remote, sync_directory, write_whole

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"
CHECKPOINTS = "checkpoints"
LATEST = "latest"


class RunDirectory:
    """Paths of a run. `latest` in `checkpoints` holds the name of the newest complete checkpoint.

    checkpoints: another folder for them than that of this name in the run's own, maybe in an object store.
    """

    def __init__(self, path: str | Path, checkpoints: str | Path | None = None) -> None:
        self.path = as_path(path)
        self.checkpoints = self.path / CHECKPOINTS if checkpoints is None else as_path(checkpoints)

    def create(self) -> None:
        """Make the folders. Raises ConfigError when that is not possible."""
        _make_writable(self.path, "run directory", "--run-dir")
        if not is_remote(self.checkpoints):
            _make_writable(self.checkpoints, "checkpoints", "--run-dir or checkpoint.save")

    def write_config(self, loaded: LoadedConfig) -> None:
        """The resolved configuration, which `mt train <path>` takes as it is, and where each value came from."""
        _write(self.path / CONFIG_FILE, json.dumps(loaded.config.to_dict(), indent=2) + "\n")
        _write(self.path / "config-origins.json", json.dumps(dict(loaded.origins), indent=2) + "\n")

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / f"iter_{iteration:07d}"

    def find(self, step: int | None = None) -> Path | None:
        """The checkpoint of a step, or without one the newest complete one; None when there is none at all.

        Raises CheckpointError when that of the step is not there, when the pointer to the newest cannot be read, and
        when it names a checkpoint that is not there.
        """
        return self._of_step(step) if step is not None else self.latest_checkpoint()

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, None when there is none. Raises CheckpointError as `find` does."""
        pointer = self.checkpoints / LATEST
        try:
            name = pointer.read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{pointer} cannot be read: {error}") from error
        path = self.checkpoints / name
        if not name or not path.is_dir():
            raise CheckpointError(
                f"{pointer} names {name or 'nothing'}, which is not there; checkpoints are {self._listed()}"
            )
        return path

    def _of_step(self, step: int) -> Path | None:
        path = self.checkpoint(step)
        if path.is_dir():
            return path
        if not any(children(self.checkpoints)):
            return None
        raise CheckpointError(
            f"checkpoint.ckpt_step={step}: {self.checkpoints} has no checkpoint of that step; it has {self._listed()}"
        )

    def _listed(self) -> str:
        names = sorted(entry.name for entry in children(self.checkpoints) if entry.name.startswith("iter_"))
        return ", ".join(names) or "none"

    def set_latest(self, checkpoint: Path) -> None:
        """Point to a complete checkpoint, atomically."""
        _write(self.checkpoints / LATEST, checkpoint.name + "\n")
        if not is_remote(self.checkpoints):
            sync_directory(self.checkpoints)


def _make_writable(folder: Path, what: str, key: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        raise ConfigError(f"{what} {folder}: {error.strerror}; choose another with {key}") from error


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be written: {reason}; what was there before is untouched") from error


def find_checkpoint(path: str | Path, step: int | None = None) -> Path:
    """A checkpoint given by its own path, or by its run directory or that one's folder of checkpoints.

    step: of a run, take this step's instead of the newest. A path may be a URL of an object store.
    """
    given = as_path(path)
    if not given.is_dir():
        raise CheckpointError(f"{given}: no such directory; give a run directory or a checkpoint in it")
    folders = [folder for folder in (given / CHECKPOINTS, given) if (folder / LATEST).is_file()]
    if not folders and not (given / CHECKPOINTS).is_dir():
        return given
    found = RunDirectory(given, folders[0]).find(step) if folders else None
    if found is None:
        raise CheckpointError(f"{given}: this run has no complete checkpoint yet")
    return found
