"""Which checkpoints of a run are kept, and removing the others."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from mt_core.errors import CheckpointError
from mt_core.paths import children, is_remote, remove_tree

PREFIX = "iter_"


def checkpoints_in(folder: Path, is_complete: Callable[[Path], bool]) -> list[Path]:
    """The complete checkpoints `iter_NNNNNNN` of a folder, oldest first."""
    # Temporary folders and folders of the user's are not candidates.
    named = (path for path in children(folder) if re.fullmatch(rf"{PREFIX}\d+", path.name))
    return [path for path in sorted(named, key=iteration_of) if is_complete(path)]


def superfluous(
    checkpoints: Sequence[Path], keep_last: int, keep_every: int | None, named: Collection[str | None]
) -> list[Path]:
    """Those to remove: neither among the newest `keep_last` nor of an iteration that `keep_every` divides.

    checkpoints: oldest first. named: names of folders that are kept in any case, of the latest and the best one.
    """
    kept = {*checkpoints[-keep_last:]}
    kept |= {path for path in checkpoints if keep_every and iteration_of(path) % keep_every == 0}
    kept |= {path for path in checkpoints if path.name in named}
    return [path for path in checkpoints if path not in kept]


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; one that is half removed when the process dies does not look like a checkpoint.

    It is renamed to a name that the next save of mt's own format cleans up. Raises CheckpointError when it cannot be
    removed.
    """
    try:
        _remove(checkpoint)
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: cannot be removed: {error.strerror or error}") from error


def _remove(checkpoint: Path) -> None:
    if is_remote(checkpoint):
        for file in [file for file in children(checkpoint) if file.suffix == ".json"]:
            file.unlink()  # without its manifest it is none any more
        remove_tree(checkpoint)
        return
    # One rename takes the checkpoint away at once; the removal of its files may take minutes.
    aside = checkpoint.with_name(f".tmp-mt-{checkpoint.name}-removed")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    shutil.rmtree(aside)


def iteration_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))
