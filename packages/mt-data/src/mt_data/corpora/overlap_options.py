"""The options of `mt data decontaminate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mt_core.errors import ConfigError


@dataclass(frozen=True)
class OverlapOptions:
    """The rules of Brown et al. 2020 (GPT-3), appendix C, with its values by default.

    ngram: words of the n-grams that training and evaluation documents may not share.
    min_ngram: a shorter evaluation text of at least so many words counts as one n-gram; still shorter ones
    cannot be searched for, and are counted in the report.
    max_documents: n-grams in more training documents than this are common phrases, and ignored; None for no limit.
    min_share: act only where shared n-grams cover at least this share of a document's words.
    action: "split" cuts shared n-grams out with `window` characters on either side; "drop" drops the document.
    min_piece: pieces with fewer characters are dropped. max_pieces: a document cut into more is dropped.
    """

    ngram: int = 13
    min_ngram: int = 8
    max_documents: int | None = 10
    min_share: float = 0.0
    action: Literal["split", "drop"] = "split"
    window: int = 200
    min_piece: int = 200
    max_pieces: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.ngram:
            raise ConfigError(f"--min-ngram {self.min_ngram} must be between 1 and --ngram {self.ngram}")
        if self.action not in ("split", "drop"):
            raise ConfigError(f"--action {self.action!r} is not known; give split or drop")
        if not 0 <= self.min_share <= 1:
            raise ConfigError(f"--min-share {self.min_share} is out of range; give 0 to 1")
        if self.window < 0 or self.min_piece < 0 or self.max_pieces < 1:
            raise ConfigError("--window and --min-piece must be at least 0, --max-pieces at least 1")
        if self.max_documents is not None and self.max_documents < 1:
            raise ConfigError("--max-documents must be at least 1; 0 on the command line means no limit")
