"""The sequences that the towers take: CLS question SEP, and CLS title SEP text SEP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mt_core.specs import Tokenizer
from mt_data.datasets.pair_encoding import special_ids


@dataclass(frozen=True)
class TextPairs:
    """length: of the longest sequence. What is longer is cut before the last SEP, as Megatron does."""

    length: int
    cls: int
    sep: int
    pad: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, length: int) -> TextPairs:
        """Raises ConfigError for a tokenizer without CLS, SEP or PAD."""
        return cls(length, **special_ids(tokenizer, ("cls", "sep", "pad"), "dpr"))

    def question(self, text: Sequence[int]) -> list[int]:
        return self._cut([self.cls, *text])

    def passage(self, title: Sequence[int], text: Sequence[int]) -> list[int]:
        return self._cut([self.cls, *title, self.sep, *text])

    def _cut(self, tokens: list[int]) -> list[int]:
        # SEP is always there, also behind a text that was cut.
        return [*tokens[: self.length - 1], self.sep]


def bare_question(text: str) -> str:
    """Without one question mark at the end, which DPR's files have and Natural Questions' do not."""
    return text.removesuffix("?")
