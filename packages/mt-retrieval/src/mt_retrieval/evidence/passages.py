"""What is embedded and searched: numbered passages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Passage:
    """id: as the file has it, unique within the evidence."""

    id: int
    text: str
    title: str


class Evidence(Protocol):
    """Passages by row, 0 to len - 1."""

    name: str
    """The path that the user gave."""

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """SHA-256 of the content; where it lies does not count."""
        ...

    def passage(self, row: int) -> Passage: ...

    def tokens(self, row: int) -> tuple[list[int], list[int]]:
        """Ids of the title and of the text, without special ones."""
        ...
