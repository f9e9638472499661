"""Shards in webdataset's layout: a tar archive in which consecutive members with one key are a sample.

The key of a member is its path up to the first dot of its file name, the rest is its extension:
`train/0001.jpg` and `train/0001.json` are `jpg` and `json` of the sample `train/0001`. Samples are read at random
places, so that their order does not depend on the number of workers; that needs archives that are not compressed.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mt_core.errors import DataError
from mt_data.datasets.images.image_file import ImageFile


@dataclass
class ShardSample:
    """members: extension (lower case, without its dot) -> where its bytes are. number: of the sample, from 1."""

    key: str
    number: int
    members: dict[str, ImageFile] = field(default_factory=dict)


def iter_shard(path: Path) -> Iterator[ShardSample]:
    """The samples of an archive, in its order.

    Raises DataError for a file that is no tar archive, is compressed or cut short, and for a sample that has an
    extension twice.
    """
    sample: ShardSample | None = None
    for member in _members(path):
        key, extension = key_and_extension(member.member)
        if not extension:
            continue
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = ShardSample(key, 1 if sample is None else sample.number + 1)
        if extension in sample.members:
            raise DataError(f"{path}: the sample {key} has two members with the extension {extension}; rename one")
        sample.members[extension] = member
    if sample is not None:
        yield sample


def key_and_extension(name: str) -> tuple[str, str]:
    """ "a/b.x.jpg" -> ("a/b", "x.jpg"); names without a dot have no extension."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def _members(path: Path) -> Iterator[ImageFile]:
    try:
        # "r:" refuses compressed archives, in which members have no offset in the file. Only headers are read here.
        with tarfile.open(path, "r:") as archive:
            end = path.stat().st_size
            for member in archive:
                if member.isfile():
                    yield _within(path, member, end)
    except tarfile.TarError as error:
        raise DataError(
            f"{path} cannot be read as a tar archive: {error}; shards are tar archives without compression"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _within(path: Path, member: tarfile.TarInfo, end: int) -> ImageFile:
    file = ImageFile(path, member.name, member.offset_data, member.size)
    if file.offset + file.size > end:
        raise DataError(f"{file} ends behind the archive, which is cut short; write it again")
    return file
