"""The checkpoints of a run, and which of them `mt ckpt prune` removes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mt_ckpt.locate import TRACKER
from mt_core import retention
from mt_core.checkpoint_lookup import best_name
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost


def checkpoints_of(run: Path, host: PluginHost) -> list[Path]:
    """The complete checkpoints, of whatever format, of a run directory (or of its `checkpoints`), oldest first.

    Raises CheckpointError when there is none.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if not folder.is_dir():
        raise CheckpointError(f"{run}: no such directory")
    detectors = [spec.detect.load() for spec in host.checkpoint_loaders]
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
