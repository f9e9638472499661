"""Saves a checkpoint in mt's native format."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_ckpt.native import manifest as manifests
from mt_ckpt.native import storage_backends
from mt_ckpt.native.checksum import checksum
from mt_ckpt.native.manifest import FILES_FOLDER, METADATA_NAME, Manifest, StoredFile, StoredShard, StoredTensor
from mt_ckpt.native.shards import ShardWriter
from mt_ckpt.sizes import format_bytes
from mt_core.errors import CheckpointError
from mt_core.paths import absolute, is_remote

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 1 << 30
_MAKE_ROOM = "remove old checkpoints or put the run directory on a larger disk"
_OUT_OF_SPACE = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}


def save_checkpoint(
    path: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, Any],
    files: Mapping[str, bytes],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the checkpoint directory `path`; it appears, or replaces the one of that name, when it is complete.

    tensors: (name, tensor) pairs, dense, of any shape, stride and device. They are written one by one as
    they come, so that besides the caller's own tensors at most one is held in memory. Tensors that share
    memory are each stored in full.
    metadata: JSON values. files: contents by relative path ("tokenizer/vocab.json").

    Raises CheckpointError when `path` exists and is no checkpoint, when something cannot be stored, and
    when writing fails; nothing under the name `path` has changed then.
    """
    path = absolute(path)
    refuse_foreign(path)
    small = small_files(metadata, files)
    with writing(path):
        _, place = storage_backends.begin(path)
    with (
        closing(place),
        # Exits run from the last to the first: the writer's threads and files are closed before the folder they write
        # to is removed.
        closing(ShardWriter(place.folder, max_shard_bytes, place.prefix, place.shard_on_disk)) as writer,
    ):
        # `writing` surrounds each operation on files, but not the iteration over `tensors`: an OSError of the caller's
        # generator is not reported as a failure to save.
        for name, tensor in tensors:
            with writing(path, tensor.numel() * tensor.element_size()):
                writer.add(name, tensor)
        with writing(path):
            writer.finish()
            place.commit(small, build_manifest(small, writer.shards, writer.tensors))


def small_files(metadata: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """metadata.json and the small files, by their paths in a checkpoint.

    Raises CheckpointError for values that are not JSON's and names that lead out of the checkpoint.
    """
    return {METADATA_NAME: _encode_metadata(metadata), **_named_files(files)}


def build_manifest(
    small: Mapping[str, bytes], shards: dict[str, StoredShard], tensors: dict[str, StoredTensor]
) -> bytes:
    """The content of manifest.json, which lists everything else."""
    files = {name: StoredFile(num_bytes=len(data), checksum=checksum(data)) for name, data in small.items()}
    return manifests.to_bytes(Manifest(written_by=written_by(), files=files, shards=shards, tensors=tensors))


def written_by() -> str:
    return f"mt-ckpt {version('mt-ckpt')}"


def _encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    # Encoded once by key, so that the message names the key; json.dumps of the whole would not.
    for key, value in metadata.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"metadata.{key} is not made of JSON values: {error}") from None
    return (json.dumps(dict(metadata), indent=2) + "\n").encode()


def _named_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    for name in files:
        if not manifests.is_inside(name):
            raise CheckpointError(f'file name {name!r}: give a relative path such as "tokenizer/vocab.json"')
    return {f"{FILES_FOLDER}/{name}": data for name, data in files.items()}


def refuse_foreign(path: Path) -> None:
    """Raises unless `path` is absent, a checkpoint or an empty directory: nothing else is replaced."""
    # A checkpoint under this name is replaced, since a run that resumes reaches the same iteration again.
    if not path.exists() or manifests.detect(path):
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    if is_remote(path) and all(entry.name == storage_backends.REPORTS or _is_shard(entry) for entry in path.iterdir()):
        return  # what an interrupted attempt left
    raise CheckpointError(f"{path}: exists and is not an mt checkpoint; remove it or save under another name")


@contextmanager
def writing(path: Path, num_bytes: int = 0) -> Iterator[None]:
    """Turns an OSError into a CheckpointError; num_bytes is what was to be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(_failure(path, error, num_bytes)) from error


def _failure(path: Path, error: OSError, num_bytes: int) -> str:
    where = f" ({error.filename})" if error.filename else ""
    reason = f"{error.strerror or error}{where}"
    advice = _OUT_OF_SPACE.get(error.errno or 0)
    if is_remote(path):
        advice = "check the address and the credentials of the object store"
    elif advice:
        needed = f"at least {format_bytes(num_bytes)} more needed, " if num_bytes else ""
        # The path itself does not exist yet; statvfs needs one that does.
        free = format_bytes(shutil.disk_usage(_existing(path)).free)
        reason += f"; {needed}{free} free on the disk that holds {path.parent}"
    else:
        advice = "make the directory writable or choose another run directory"
    return f"{path}: not saved: {reason}; checkpoints saved before are untouched; {advice}"


def _is_shard(file: Path) -> bool:
    return file.name.endswith(".safetensors")


def _existing(path: Path) -> Path:
    return next(folder for folder in path.parents if folder.exists())
