"""Finds the checkpoint that a path on the command line means, and those that `mt ckpt prune` removes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mt_core import retention
from mt_core.checkpoint_lookup import best_name
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost

TRACKER = "latest"
"""A text file in `<run>/checkpoints` that holds the name of the newest checkpoint directory."""


def resolve_run(path: Path) -> Path:
    """The latest checkpoint if `path` is a run directory or its `checkpoints`, else `path`.

    Of which format a checkpoint is, its loader says: that of mt, or that of the saver which wrote the run. Raises
    CheckpointError when there is nothing at `path`, or `latest` does not name a directory beside it.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    for folder in (path / "checkpoints", path):
        if (folder / TRACKER).is_file():
            return _tracked(folder)
    return path


def _tracked(folder: Path) -> Path:
    name = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    path = folder / name
    # `Path(name).name != name`: the tracker may not lead out of its folder.
    if not name or Path(name).name != name or not path.is_dir():
        raise CheckpointError(f"{folder / TRACKER}: names {name!r}, which is not a checkpoint in {folder}")
    return path


def checkpoints_of(run: Path, host: PluginHost) -> list[Path]:
    """The complete checkpoints, of whatever format, of a run directory (or of its `checkpoints`), oldest first.

    Raises CheckpointError when there is none.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if not folder.is_dir():
        raise CheckpointError(f"{run}: no such directory")
    detectors = [spec.detect.load() for spec in host[CHECKPOINT_LOADERS]]
    # Only what a loader recognizes: a folder that is being written is not counted as the newest.
    whole = retention.checkpoints_in(folder, lambda path: any(detect(path) for detect in detectors))
    if not whole:
        raise CheckpointError(f"{run}: has no checkpoint {retention.PREFIX}NNNNNNN")
    return whole


def superfluous(checkpoints: Sequence[Path], keep_last: int, keep_every: int | None) -> list[Path]:
    """Those to remove, never the latest and the best one. Raises ConfigError for numbers below 1."""
    for flag, value in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value}: give 1 or more; the latest checkpoint is always kept")
    folder = checkpoints[-1].parent if checkpoints else None
    # Kept whatever the numbers say: a resumed run begins from the latest one, RUN/best names the best one.
    named = () if folder is None else (_latest(folder), best_name(folder))
    return retention.superfluous(checkpoints, keep_last, keep_every, named)


def _latest(folder: Path) -> str | None:
    try:
        return (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
