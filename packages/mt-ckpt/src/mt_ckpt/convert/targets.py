"""Where a conversion writes: a folder of this machine, or one of an object store."""

from __future__ import annotations

from pathlib import Path

from mt_ckpt.convert.remote import RemoteFolder, require_free_place
from mt_ckpt.convert.resumable import ResumableFolder, require_free_folder
from mt_core.errors import ConfigError
from mt_core.paths import absolute, as_path, is_remote
from mt_core.specs import CheckpointSaverSpec

OutputFolder = ResumableFolder | RemoteFolder


def target_path(save_dir: str | Path, saver: CheckpointSaverSpec) -> Path:
    """Where to write, from the root on. Raises ConfigError for an address with a format that only disks take."""
    path = absolute(as_path(save_dir))
    if is_remote(path) and not saver.converts_to_addresses:
        raise ConfigError(
            f"--save-dir {save_dir}: --saver {saver.name} writes local folders; copy the result there (mt and hf write "
            "to addresses)"
        )
    return path


def require_free(path: Path) -> None:
    """Raises CheckpointError for a place that is taken."""
    (require_free_place if is_remote(path) else require_free_folder)(path)


def output_folder(path: Path, key: str | None) -> OutputFolder:
    """The folder that becomes `path`; key: says what it is made of, None: it is not gone on with after a kill."""
    return RemoteFolder(path, key) if is_remote(path) else ResumableFolder(path, key)
