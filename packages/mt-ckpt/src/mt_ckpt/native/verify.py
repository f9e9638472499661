"""Verifies every byte of a checkpoint in mt's native format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from mt_ckpt.native.checksum import checksum_range
from mt_ckpt.native.manifest import Manifest
from mt_ckpt.native.read import check_size, damaged
from mt_core.errors import CheckpointError

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
