"""Which checkpoints of a run are kept, and removing the others."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from mt_ckpt.locate import TRACKER
from mt_ckpt.native.manifest import detect
from mt_ckpt.native.staging import STAGING_PREFIX
from mt_core.errors import CheckpointError, ConfigError

PREFIX = "iter_"


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints of a run directory (or of its `checkpoints`), oldest first.

    Raises CheckpointError when there is none.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if not folder.is_dir():
        raise CheckpointError(f"{run}: no such directory")
    found = {_iteration(path): path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdecimal()}
    whole = [found[iteration] for iteration in sorted(found) if detect(found[iteration])]
    if not whole:
        raise CheckpointError(f"{run}: has no checkpoint {PREFIX}NNNNNNN")
    return whole


def superfluous(checkpoints: Sequence[Path], keep_last: int, keep_every: int | None) -> list[Path]:
    """Those to remove: neither among the newest `keep_last` nor of an iteration that `keep_every` divides.

    The one that `latest` names is always kept. Raises ConfigError for numbers below 1.
    """
    for flag, value in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value}: give 1 or more; the latest checkpoint is always kept")
    kept = {*checkpoints[-keep_last:]}
    kept |= {path for path in checkpoints if keep_every and _iteration(path) % keep_every == 0}
    kept |= {path for path in checkpoints if path.name == _latest(path.parent)}
    return [path for path in checkpoints if path not in kept]


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; one that is half removed when the process dies does not look like a checkpoint.

    Raises CheckpointError when that is not possible.
    """
    aside = checkpoint.with_name(f"{STAGING_PREFIX}{checkpoint.name}-removed")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: cannot be removed: {error.strerror or error}") from error


def _iteration(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def _latest(folder: Path) -> str | None:
    try:
        return (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
