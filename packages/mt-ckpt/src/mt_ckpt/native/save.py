"""Saves a checkpoint in mt's native format, from one process or from all ranks of a run."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from mt_ckpt.files.checksum import checksum
from mt_ckpt.files.sizes import format_bytes
from mt_ckpt.native import manifest as manifests
from mt_ckpt.native import storage_backends
from mt_ckpt.native.manifest import FILES_FOLDER, METADATA_NAME, Manifest, StoredFile, StoredShard, StoredTensor
from mt_ckpt.native.shards import ShardWriter
from mt_core.checkpoint_specs import Fragment
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


# -- from all ranks of a run, each of which writes its shards ----------------------------------------


class Report(BaseModel):
    """What a rank wrote, or the error that prevented it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shards: dict[str, StoredShard] = {}
    tensors: dict[str, StoredTensor] = {}
    error: str | None = None


class ShardedSave:
    """A `mt_core.checkpoint_specs.ShardedSave`."""

    def __init__(self, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._max_shard_bytes = max_shard_bytes
        # By the token of `begin`. Several checkpoints may be in flight, since an asynchronous save ends after the next
        # has begun.
        self._begun: dict[str, storage_backends.FirstRanksPlace | storage_backends.RemotePlace] = {}

    def begin(self, path: Path) -> str:
        """Raises CheckpointError when `path` exists and is no checkpoint, and when nothing can be written there."""
        path = absolute(path)
        refuse_foreign(path)
        with writing(path):
            token, place = storage_backends.begin(path)
        self._begun[token] = place
        return token

    def write(
        self,
        path: Path,
        place: str,
        rank: int,
        num_ranks: int,
        fragments: Iterable[Fragment],
        metadata: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> None:
        """Raises CheckpointError when this rank, or on the first one any rank, cannot write its share."""
        path = absolute(path)
        if rank > 0:
            with storage_backends.joined(path, place) as joined:
                self._write_own(path, joined, rank, num_ranks, fragments)
            return
        with closing(self._begun.pop(place)) as first:
            small = small_files(metadata, files)
            report = self._write_own(path, first, rank, num_ranks, fragments)
            # Blocks until every other rank has reported. No collective is used: this runs in a thread beside training,
            # and two threads that use one process group could order their collectives differently on different ranks.
            reports = [report, *_others(path, first, num_ranks)]
            with writing(path):
                first.commit(small, build_manifest(small, *_merged(reports)))

    def _write_own(
        self,
        path: Path,
        place: storage_backends.StagedPlace | storage_backends.RemotePlace,
        rank: int,
        num_ranks: int,
        fragments: Iterable[Fragment],
    ) -> Report:
        try:
            report = self._write_shards(path, place, rank, num_ranks, fragments)
        except Exception as error:
            # Without this report the first rank would poll for ever while this rank fails.
            self._tell(path, place, rank, Report(error=str(error)))
            raise
        self._tell(path, place, rank, report)
        return report

    @staticmethod
    def _tell(
        path: Path, place: storage_backends.StagedPlace | storage_backends.RemotePlace, rank: int, report: Report
    ) -> None:
        if rank > 0:  # the first rank receives the reports
            with writing(path):
                place.report(rank, report.model_dump_json().encode())

    def _write_shards(
        self,
        path: Path,
        place: storage_backends.StagedPlace | storage_backends.RemotePlace,
        rank: int,
        num_ranks: int,
        fragments: Iterable[Fragment],
    ) -> Report:
        # Names are unique over ranks, since all write into one folder. A single rank omits its number, so that its
        # files are named as `save_checkpoint` names them.
        of_rank = f"rank-{rank:05d}-" if num_ranks > 1 else ""
        prefix = place.prefix + of_rank
        with closing(ShardWriter(place.folder, self._max_shard_bytes, prefix, place.shard_on_disk)) as writer:
            for fragment in fragments:
                values = fragment.tensor()
                with writing(path, values.numel() * values.element_size()):
                    writer.add_piece(fragment.name, fragment.shape, fragment.tensor_slice, values)
            with writing(path):
                writer.finish()
        return Report(shards=writer.shards, tensors=writer.tensors)


def _others(
    path: Path, place: storage_backends.StagedPlace | storage_backends.RemotePlace, num_ranks: int
) -> list[Report]:
    with writing(path):
        contents = storage_backends.wait_for_reports(place, num_ranks - 1)
    # Sorted by rank: the manifest does not depend on which rank reports first.
    reports = {rank: Report.model_validate_json(content) for rank, content in sorted(contents.items())}
    for rank, report in reports.items():
        if report.error is not None:
            raise CheckpointError(f"{path}: rank {rank} could not write its share: {report.error}")
    return list(reports.values())


def _merged(reports: Iterable[Report]) -> tuple[dict[str, StoredShard], dict[str, StoredTensor]]:
    shards: dict[str, StoredShard] = {}
    tensors: dict[str, StoredTensor] = {}
    for report in reports:
        shards.update(report.shards)
        for name, tensor in report.tensors.items():
            # Ranks write disjoint pieces of a tensor, see `mt_core.train.checkpoint.write_plan`.
            before = tensors[name].pieces if name in tensors else ()
            tensors[name] = tensor.model_copy(update={"pieces": (*before, *tensor.pieces)})
    return shards, tensors
