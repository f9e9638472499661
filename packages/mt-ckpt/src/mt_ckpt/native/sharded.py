"""Saves a checkpoint in mt's native format from all ranks of a run; each rank writes its shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mt_ckpt.native import storage_backends
from mt_ckpt.native.manifest import StoredShard, StoredTensor
from mt_ckpt.native.save import MAX_SHARD_BYTES, build_manifest, refuse_foreign, small_files, writing
from mt_ckpt.native.shards import ShardWriter
from mt_core.errors import CheckpointError
from mt_core.paths import absolute
from mt_core.specs import Fragment


class Report(BaseModel):
    """What a rank wrote, or the error that prevented it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shards: dict[str, StoredShard] = {}
    tensors: dict[str, StoredTensor] = {}
    error: str | None = None


class ShardedSave:
    """A `mt_core.specs.ShardedSave`."""

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
            own = self._write_own(path, first, rank, num_ranks, fragments)
            # Blocks until every other rank has reported. No collective is used: this runs in a thread beside training,
            # and two threads that use one process group could order their collectives differently on different ranks.
            reports = [own, *_others(path, first, num_ranks)]
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
        found = storage_backends.wait_for_reports(place, num_ranks - 1)
    # Sorted by rank: the manifest does not depend on which rank reports first.
    reports = {rank: Report.model_validate_json(content) for rank, content in sorted(found.items())}
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
