"""Finds the checkpoint that a path on the command line means."""

from __future__ import annotations

from pathlib import Path

from mt_core.errors import CheckpointError

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
