"""Where the bytes of an image are: a file, or a member of a tar archive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mt_core.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".npy"})


@dataclass(frozen=True)
class ImageFile:
    """path: the file. member: name within the archive `path`, whose bytes begin at `offset`; empty for a file."""

    path: Path
    member: str = ""
    offset: int = 0
    size: int = -1

    @property
    def suffix(self) -> str:
        """Lower case, with its dot."""
        return Path(self.member or self.path.name).suffix.lower()

    def __str__(self) -> str:
        return f"{self.path}, member {self.member}" if self.member else str(self.path)

    def open(self) -> BinaryIO:
        """The whole of `path`. Raises DataError for a file that is missing or cannot be opened, and for a path that no
        file can have."""
        try:
            return self.path.open("rb")
        except OSError as error:
            raise DataError(f"{self} cannot be read: {error.strerror or error}") from error
        except ValueError as error:  # a null character, or a surrogate that no byte stands for
            raise DataError(f"{str(self)!a} cannot be the path of a file: {error}") from error

    def read(self) -> bytes:
        """Raises DataError for a file that cannot be read, or ends before the member does."""
        with self.open() as file:
            try:
                file.seek(self.offset)
                data = file.read(self.size)
            except OSError as error:
                raise DataError(f"{self} cannot be read: {error.strerror or error}") from error
        if self.member and len(data) != self.size:
            raise DataError(f"{self} has {len(data)} of its {self.size} bytes; the archive is cut short")
        return data
