"""Writes another format's checkpoint in mt's own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mt_ckpt.files.checksum import checksum
from mt_ckpt.files.dtypes import format_name
from mt_ckpt.files.safetensors import Part, TensorInfo, align, split_by_size
from mt_ckpt.native import manifest as manifests
from mt_ckpt.native.manifest import MANIFEST_NAME, Manifest, StoredFile, StoredPiece, StoredShard, StoredTensor
from mt_ckpt.native.save import MAX_SHARD_BYTES, small_files
from mt_ckpt.writing.file_plans import SafetensorsFiles, write_files
from mt_ckpt.writing.options import refuse_layout
from mt_ckpt.writing.output_folders import output_folder
from mt_ckpt.writing.resumable import work_key
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.plugins import PluginHost

TENSOR_CHECKSUMS, HEADER_BYTES, HEADER_CHECKSUM = "tensors", "header_bytes", "header_checksum"
"""What the record of a finished shard keeps for the manifest."""


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Everything that `source` has: the model, the optimizer and random streams if they are there, metadata, files.

    Raises ConfigError for options that cut tensors, CheckpointError, and OSError.
    """
    plan = plan_files(source, options, host)
    metadata = {"iteration": 0, **source.metadata, "converted_by": _writer()}
    small = small_files(metadata, source.files())
    identity = getattr(source, "identity", None)
    # Work of an interrupted run is resumed only if the source, the format and the grouping into shards are equal. A
    # reader without an identity is converted from the beginning.
    key = work_key("mt", identity, {file: list(group) for file, group in plan.files.items()}) if identity else None
    with closing(output_folder(path, key, checksums=False)) as folder:
        finished = write_files(folder, plan, source, _about)
        for name, data in {**small, MANIFEST_NAME: _manifest(plan.files, finished, small)}.items():
            folder.write_small(name, data)
        # The manifest lists everything else, so it is written after the other files.
        folder.commit({*plan.files, *small, MANIFEST_NAME})


def plan_files(source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> SafetensorsFiles:
    """The shards of `convert_checkpoint`. Raises ConfigError for options that cut tensors."""
    refuse_layout("mt", options)
    shapes, dtypes = source.shapes(), source.dtypes()
    infos = align({name: TensorInfo(tuple(shape), dtypes[name]) for name, shape in shapes.items()})
    groups = split_by_size(infos, options.max_shard_size or MAX_SHARD_BYTES)
    shards = {f"tensors-{number:05d}.safetensors": group for number, group in enumerate(groups, 1)}
    return SafetensorsFiles(shards, lambda names: map(source.read, names))


def _about(group: Mapping[str, TensorInfo], parts: list[Part]) -> Mapping[str, Any]:
    # `parts` are in the order of the file: its header, then the tensors as they follow one another.
    (header_bytes, header_checksum), *tensors = parts
    return {
        TENSOR_CHECKSUMS: {name: digest for name, (_, digest) in zip(group, tensors, strict=True)},
        HEADER_BYTES: header_bytes,
        HEADER_CHECKSUM: header_checksum,
    }


def _manifest(
    shards: Mapping[str, Mapping[str, TensorInfo]],
    finished: Mapping[str, Mapping[str, Any]],
    small: Mapping[str, bytes],
) -> bytes:
    stored: dict[str, StoredTensor] = {}
    for file, group in shards.items():
        # Offsets are not recorded: tensors follow one another without gaps, in the order of the group.
        offset = finished[file][HEADER_BYTES]
        for name, info in group.items():
            dtype = format_name(info.dtype) or ""  # the writer has refused what has none
            digest = finished[file][TENSOR_CHECKSUMS][name]
            # A converted tensor is one whole piece.
            start = (0,) * len(info.shape)
            piece = StoredPiece(shard=file, offset=offset, start=start, shape=info.shape, checksum=digest)
            stored[name] = StoredTensor(dtype=dtype, shape=info.shape, pieces=(piece,))
            offset += info.num_bytes
    manifest = Manifest(
        written_by=_writer(),
        files={name: StoredFile(num_bytes=len(data), checksum=checksum(data)) for name, data in small.items()},
        shards={
            file: StoredShard(
                num_bytes=about[HEADER_BYTES] + sum(info.num_bytes for info in shards[file].values()),
                header_bytes=about[HEADER_BYTES],
                header_checksum=about[HEADER_CHECKSUM],
            )
            for file, about in finished.items()
        },
        tensors=stored,
    )
    return manifests.to_bytes(manifest)


def _writer() -> str:
    return f"mt-ckpt {version('mt-ckpt')}"
