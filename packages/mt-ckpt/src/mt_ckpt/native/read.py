"""Reads a checkpoint in mt's native format, with every byte verified, and verifies whole checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mt_ckpt.files.checksum import check_size, checksum_range, parse_json, read_range
from mt_ckpt.files.dtypes import ELEMENT_TYPES
from mt_ckpt.native.manifest import (
    FILES_FOLDER,
    METADATA_NAME,
    Manifest,
    StoredPiece,
    StoredTensor,
    read_manifest,
)
from mt_core.errors import CheckpointError, did_you_mean
from mt_core.plugins import PluginHost
from mt_core.tensor_slice import TensorSlice


def open_checkpoint(path: Path, host: PluginHost | None = None) -> NativeReader:
    """Open the checkpoint directory `path`. host is not needed: the names are canonical.

    The folder is listed once and no shard is opened: all ranks of a run do this, and there may be thousands of
    shards in an object store. The size of a shard and its header are checked when the first tensor of it is read.

    Raises CheckpointError when its manifest or metadata is missing or damaged, when it was written by a
    newer version, and when a shard is missing.
    """
    manifest = read_manifest(path)
    _require_shards(path, manifest)
    return NativeReader(path, manifest)


def _require_shards(path: Path, manifest: Manifest) -> None:
    try:
        # One listing in place of a stat for each shard, which would be a request each in an object store.
        there = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be listed: {error.strerror or error}") from error
    if missing := [name for name in manifest.shards if name not in there]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{path / missing[0]}: missing{more}; use an earlier checkpoint")


class NativeReader:
    """An open checkpoint (a `CheckpointReader`). Threads may read from it at the same time."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.metadata: Mapping[str, Any] = parse_json(path / METADATA_NAME, self._read_file(METADATA_NAME))
        self._checked_shards: set[str] = set()

    @property
    def files_folder(self) -> Path:
        """Where what `files` gives lies under its names."""
        return self.path / FILES_FOLDER

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.manifest.tensors.items()}

    @cached_property
    def _dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: ELEMENT_TYPES[tensor.dtype].torch_dtype() for name, tensor in self.manifest.tensors.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, in the order in which they were saved."""
        return self._shapes

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The element type of every tensor."""
        return self._dtypes

    def read(self, name: str) -> torch.Tensor:
        """One tensor on CPU, contiguous. Raises CheckpointError for an unknown name and for a damaged file."""
        return self.read_slices(name, [TensorSlice.whole(self._stored(name).shape)])[0]

    def read_slices(self, name: str, slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
        """Parts of a tensor, each on CPU and contiguous. Only the pieces that have some of it are read, those whole.

        Raises CheckpointError for an unknown name and for a damaged file.
        """
        stored = self._stored(name)
        dtype = ELEMENT_TYPES[stored.dtype].torch_dtype()
        targets = [(tensor_slice, torch.empty(tensor_slice.shape, dtype=dtype)) for tensor_slice in slices]
        for piece in stored.pieces:
            # (slices of the piece, view of the target) for each target that overlaps this piece.
            wanted = [
                (common.relative_to(piece.start).slices, target[common.relative_to(tensor_slice.start).slices])
                for tensor_slice, target in targets
                if (common := piece.tensor_slice.meet(tensor_slice)) is not None
            ]
            # One target takes the whole piece: it is read into place, without a second buffer and copy.
            if len(wanted) == 1 and wanted[0][1].shape == piece.shape and wanted[0][1].is_contiguous():
                self._read_piece(name, piece, wanted[0][1])
            elif wanted:
                # Checksums are of whole pieces, so the piece is read whole even if a part of it is needed.
                values = torch.empty(piece.shape, dtype=dtype)
                self._read_piece(name, piece, values)
                for place, target in wanted:
                    target.copy_(values[place])
        return [target for _, target in targets]

    def _stored(self, name: str) -> StoredTensor:
        stored = self.manifest.tensors.get(name)
        if stored is None:
            near = did_you_mean(name, self.manifest.tensors)
            raise CheckpointError(f"{self.path}: has no tensor {name}{near}; `mt ckpt inspect --tensors` lists all")
        return stored

    def _read_piece(self, name: str, piece: StoredPiece, target: torch.Tensor) -> None:
        """target: contiguous, of the piece's shape."""
        self._check_shard(piece.shard)
        # As bytes, since NumPy has no bfloat16 and no FP8.
        data = target.reshape(-1).view(torch.uint8).numpy().data
        self._read_checked(self.path / piece.shard, piece.offset, data, piece.checksum, f"tensor {name}")

    def files(self) -> Mapping[str, bytes]:
        """The small files of the checkpoint, by the names under which they were saved."""
        prefix = f"{FILES_FOLDER}/"
        names = [name for name in self.manifest.files if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._read_file(name) for name in names}

    def _read_file(self, name: str) -> bytes:
        stored = self.manifest.files[name]
        check_size(self.path / name, stored.num_bytes)
        data = bytearray(stored.num_bytes)
        self._read_checked(self.path / name, 0, memoryview(data), stored.checksum, "the file")
        return bytes(data)

    def _check_shard(self, shard: str) -> None:
        """Its size and its header, the first time."""
        # Two threads may both find the shard unchecked; the check is then done twice, which is harmless.
        if shard in self._checked_shards:
            return
        stored = self.manifest.shards[shard]
        check_size(self.path / shard, stored.num_bytes)
        header = memoryview(bytearray(stored.header_bytes))
        self._read_checked(self.path / shard, 0, header, stored.header_checksum, "the header")
        self._checked_shards.add(shard)

    @staticmethod
    def _read_checked(file: Path, offset: int, target: memoryview, expected: str, what: str) -> None:
        try:
            actual = read_range(file, offset, target)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
        if actual != expected:
            raise CheckpointError(damaged(file, what))


def damaged(file: Path, what: str) -> str:
    return f"{file}: damaged: the checksum of {what} does not match; use an earlier checkpoint"


# -- verifying every byte ---------------------------------------------------------------------------

Part = tuple[int, int, str, str]
"""Offset and length in bytes, checksum, and what it is."""


def find_damage(path: Path, manifest: Manifest, progress: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
    """One sentence for each damaged or missing file of the checkpoint `path`, empty when it is as it was saved.

    `progress` is called with the number of bytes just read. The manifest has been checked by `read_manifest`.
    """
    problems = []
    parts = parts_by_file(manifest)
    for name, num_bytes in manifest.sizes.items():
        try:
            _check_file(path / name, num_bytes, parts[name], progress)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def parts_by_file(manifest: Manifest) -> dict[str, list[Part]]:
    """The checked ranges of each file; together they cover all of its bytes."""
    parts: dict[str, list[Part]] = {}
    for name, file in manifest.files.items():
        parts[name] = [(0, file.num_bytes, file.checksum, "the file")]
    for name, shard in manifest.shards.items():
        parts[name] = [(0, shard.header_bytes, shard.header_checksum, "the header")]
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            parts[piece.shard].append((piece.offset, tensor.bytes_of(piece), piece.checksum, f"tensor {name}"))
    return parts


def _check_file(file: Path, num_bytes: int, parts: list[Part], progress: Callable[[int], None]) -> None:
    check_size(file, num_bytes)
    try:
        wrong = list(_wrong_parts(file, parts, progress))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointError(damaged(file, wrong[0] + more))


def _wrong_parts(file: Path, parts: list[Part], progress: Callable[[int], None]) -> Iterator[str]:
    for offset, length, expected, what in parts:
        # All parts are compared, not only those up to the first mismatch: the message counts the damaged ones.
        if checksum_range(file, offset, length, progress) != expected:
            yield what
