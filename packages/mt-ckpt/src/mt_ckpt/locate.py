"""Finds the checkpoint that a path on the command line means."""

from __future__ import annotations

from pathlib import Path

from mt_ckpt.native.manifest import detect
from mt_core.errors import CheckpointError

TRACKER = "latest"
"""A text file in `<run>/checkpoints` that holds the name of the newest checkpoint directory."""


def find_checkpoint(path: Path) -> Path:
    """`path` itself when it is a checkpoint, else the one that `latest` names in a run directory.

    Raises CheckpointError when it is neither.
    """
    if detect(path):
        return path
    for folder in (path / "checkpoints", path):
        if (folder / TRACKER).is_file():
            return _tracked(folder)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    raise CheckpointError(
        f"{path}: neither a checkpoint (it has no manifest.json) nor a run directory (it has no checkpoints/{TRACKER})"
    )


def resolve_run(path: Path) -> Path:
    """The latest checkpoint of mt's own if `path` is a run directory or its `checkpoints`, else `path`.

    Raises CheckpointError when there is nothing at `path`, or `latest` does not name a checkpoint.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    tracked = any((folder / TRACKER).is_file() for folder in (path / "checkpoints", path))
    return find_checkpoint(path) if tracked else path


def _tracked(folder: Path) -> Path:
    name = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    path = folder / name
    if Path(name).name != name or not detect(path):
        raise CheckpointError(f"{folder / TRACKER}: names {name!r}, which is not a checkpoint in {folder}")
    return path
