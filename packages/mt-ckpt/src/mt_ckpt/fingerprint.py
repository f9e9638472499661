"""A hash by which results name the checkpoint that produced them."""

from __future__ import annotations

from pathlib import Path

import xxhash

from mt_ckpt.convert.checksums import CHECKSUMS
from mt_ckpt.native.checksum import BLOCK_BYTES
from mt_ckpt.native.manifest import MANIFEST_NAME


def checkpoint_fingerprint(path: Path) -> str:
    """XXH3 (128 bits, hexadecimal) of the names and contents of a checkpoint's files.

    A manifest or checksum file, which holds the checksums of the others, stands for them.
    """
    digest = xxhash.xxh3_128()
    for file in _files(path):
        # NUL cannot be in a name and the size has a fixed width, so that no two lists of files give the same bytes.
        digest.update(str(file.relative_to(path)).encode() + b"\0" + file.stat().st_size.to_bytes(8, "little"))
        _update(digest, file)
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    listed = [path / name for name in (MANIFEST_NAME, CHECKSUMS) if (path / name).is_file()]
    # The manifest of the native format comes before the checksums that `mt convert` writes.
    return listed[:1] or sorted(file for file in path.rglob("*") if file.is_file())


def _update(digest: xxhash.xxh3_128, file: Path) -> None:
    with file.open("rb") as content:
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
