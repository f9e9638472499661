"""A document as the cleaning rules see it."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mt_data.corpora.ngram_hashes import U64, word_hashes


class Document:
    """A text with what several rules need of it, each worked out once."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def lines(self) -> list[str]:
        """The lines that are not blank, without blanks at their ends."""
        return [line.strip() for line in self.text.splitlines() if line.strip()]

    @cached_property
    def paragraphs(self) -> list[str]:
        """The runs of lines between blank lines."""
        return [part.strip() for part in self.text.replace("\r\n", "\n").split("\n\n") if part.strip()]

    @cached_property
    def words(self) -> list[str]:
        """What blanks separate."""
        return self.text.split()

    @cached_property
    def word_lengths(self) -> NDArray[np.int64]:
        return np.fromiter(map(len, self.words), np.int64, len(self.words))

    @cached_property
    def word_hashes(self) -> U64:
        return word_hashes(self.words)
