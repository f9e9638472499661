"""The folder of a run: resolved configuration, metrics, log, checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mt_core.config.loading import LoadedConfig
from mt_core.errors import CheckpointError, ConfigError

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"
CHECKPOINTS = "checkpoints"
LATEST = "latest"


class RunDirectory:
    """Paths in a run's folder. `latest` in `checkpoints/` holds the name of the newest complete checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def create(self) -> None:
        """Make the folder. Raises ConfigError when that is not possible."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            if not os.access(self.checkpoints, os.W_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            raise ConfigError(f"run directory {self.path}: {error.strerror}; choose another with --run-dir") from error

    def write_config(self, loaded: LoadedConfig) -> None:
        """The resolved configuration, which `mt train <path>` takes as it is, and where each value came from."""
        _write(self.path / CONFIG_FILE, json.dumps(loaded.config.to_dict(), indent=2) + "\n")
        _write(self.path / "config-origins.json", json.dumps(dict(loaded.origins), indent=2) + "\n")

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / f"iter_{iteration:07d}"

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, None when there is none.

        Raises CheckpointError when the pointer is unreadable or names a checkpoint that is not there.
        """
        pointer = self.checkpoints / LATEST
        try:
            name = pointer.read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{pointer} cannot be read: {error}") from error
        path = self.checkpoints / name
        if not name or not path.is_dir():
            there = sorted(entry.name for entry in self.checkpoints.glob("iter_*"))
            raise CheckpointError(
                f"{pointer} names {name or 'nothing'}, which is not there; checkpoints are {', '.join(there) or 'none'}"
            )
        return path

    def set_latest(self, checkpoint: Path) -> None:
        """Point to a complete checkpoint, atomically."""
        _write(self.checkpoints / LATEST, checkpoint.name + "\n")
        descriptor = os.open(self.checkpoints, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}; what was there before is untouched"
        ) from error


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint given by its own path, or by its run directory (then the latest one)."""
    given = Path(path)
    if not given.is_dir():
        raise CheckpointError(f"{given}: no such directory; give a run directory or a checkpoint in it")
    if (given / CHECKPOINTS).is_dir():
        latest = RunDirectory(given).latest_checkpoint()
        if latest is None:
            raise CheckpointError(f"{given}: this run has no complete checkpoint yet")
        return latest
    return given
