"""Where a conversion writes: a local folder, or one in an object store."""

from __future__ import annotations

from pathlib import Path

from mt_ckpt.convert.remote import RemoteFolder, require_free_place
from mt_ckpt.convert.resumable import ResumableFolder, require_free_folder
from mt_core.errors import ConfigError
from mt_core.paths import absolute, as_path, is_remote
from mt_core.specs import CheckpointSaverSpec

OutputFolder = ResumableFolder | RemoteFolder


def target_path(save_dir: str | Path, saver: CheckpointSaverSpec) -> Path:
    """The absolute target. Raises ConfigError for the address of an object store in a format that needs a disk."""
    path = absolute(as_path(save_dir))
    if is_remote(path) and not saver.converts_to_addresses:
        raise ConfigError(
            f"--save-dir {save_dir}: --saver {saver.name} writes local folders; copy the result there (mt and hf write "
            "to addresses)"
        )
    return path


def require_free(path: Path) -> None:
    """Raises CheckpointError if the target exists."""
    (require_free_place if is_remote(path) else require_free_folder)(path)


def output_folder(path: Path, key: str | None, *, checksums: bool = True) -> OutputFolder:
    """The folder that becomes `path`; key: identifies its inputs, None: it cannot be resumed after a kill.

    checksums: whether a file of checksums of all others goes along, since the format has none.
    """
    return (RemoteFolder if is_remote(path) else ResumableFolder)(path, key, checksums=checksums)
