"""The options of `mt data dedup` and `mt data decontaminate`, of the commands and of the functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from mt_core.commands import Help
from mt_core.errors import ConfigError

Method = Literal["exact", "minhash"]
Normalization = Literal["none", "blanks", "words"]
Unit = Literal["word", "char"]
Action = Literal["split", "drop"]


@dataclass(frozen=True)
class DedupOptions:
    """Which documents `mt data dedup` takes for the same. bands, rows: see `deduplication.table_shape`."""

    method: Annotated[Method, Help("minhash: near duplicates; exact: equal texts")] = "minhash"
    normalize: Annotated[
        Normalization, Help("What exact overlooks: none, blanks, or words (blanks, case, punctuation)")
    ] = "blanks"
    threshold: Annotated[float, Help("Jaccard similarity from which texts count as the same")] = 0.8
    num_perm: Annotated[int, Help("MinHash values a document; the similarity errs by sqrt(s (1 - s) / num_perm)")] = 128
    ngram: Annotated[int, Help("Length of the n-grams that are compared")] = 5
    unit: Annotated[Unit, Help("What the n-grams are of: word or char")] = "word"
    seed: Annotated[int, Help("Of the MinHash permutations")] = 1
    bands: Annotated[int | None, Help("Bands of the LSH table; from the threshold by default")] = None
    rows: Annotated[int | None, Help("Rows of a band; from the threshold by default")] = None
    verify: Annotated[bool, Help("Compare candidates by their signatures before they count as the same")] = True
    memory_mb: Annotated[int, Help("Memory for sorting, in MiB, besides 8 bytes a document")] = 1024

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"--{name} {getattr(self, name)!r} is not known; give {', '.join(allowed)}")
        if not 0 < self.threshold < 1:
            raise ConfigError(f"--threshold {self.threshold} is out of range; give a similarity between 0 and 1")
        if self.ngram < 1 or self.num_perm < 2:
            raise ConfigError(f"--ngram {self.ngram} and --num-perm {self.num_perm}: give at least 1 and 2")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed {self.seed} is out of range; give 0 to 4294967295")
        if self.memory_mb < 1:
            raise ConfigError(f"--memory-mb {self.memory_mb} is too small; give at least 1")
        if (self.bands is None) != (self.rows is None):
            raise ConfigError("--bands and --rows belong together; give both or neither")
        if self.bands is not None and self.rows is not None and not self._table_fits(self.bands, self.rows):
            raise ConfigError(
                f"--bands {self.bands} x --rows {self.rows} must be at least 1 x 1 "
                f"and at most --num-perm {self.num_perm}"
            )

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb * 2**20

    def _table_fits(self, bands: int, rows: int) -> bool:
        return bands >= 1 and rows >= 1 and bands * rows <= self.num_perm


_CHOICES = {"method": get_args(Method), "normalize": get_args(Normalization), "unit": get_args(Unit)}


@dataclass(frozen=True)
class NgramOptions:
    """Which n-grams training and evaluation documents may not share."""

    ngram: Annotated[int, Help("Words of the n-grams that may not be shared")] = 13
    min_ngram: Annotated[int, Help("Shorter evaluation texts of at least so many words count as one n-gram")] = 8
    max_documents: Annotated[
        int, Help("Ignore n-grams in more training documents than this, as common phrases; 0 for no limit")
    ] = 10


@dataclass(frozen=True)
class OverlapOptions(NgramOptions):
    """The rules of Brown et al. 2020 (GPT-3), appendix C, with its values by default.

    Evaluation texts of fewer than `min_ngram` words cannot be searched for, and are counted in the report.
    """

    min_share: Annotated[float, Help("Act where shared n-grams cover at least this share of the words")] = 0.0
    action: Annotated[Action, Help("split: cut shared n-grams out; drop: drop the document")] = "split"
    window: Annotated[int, Help("Characters cut on either side of a shared n-gram")] = 200
    min_piece: Annotated[int, Help("Drop pieces with fewer characters")] = 200
    max_pieces: Annotated[int, Help("Drop documents cut into more pieces")] = 10

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.ngram:
            raise ConfigError(f"--min-ngram {self.min_ngram} must be between 1 and --ngram {self.ngram}")
        if self.action not in get_args(Action):
            raise ConfigError(f"--action {self.action!r} is not known; give split or drop")
        if not 0 <= self.min_share <= 1:
            raise ConfigError(f"--min-share {self.min_share} is out of range; give 0 to 1")
        if self.window < 0 or self.min_piece < 0 or self.max_pieces < 1:
            raise ConfigError("--window and --min-piece must be at least 0, --max-pieces at least 1")
        if self.max_documents < 0:
            raise ConfigError(f"--max-documents {self.max_documents} must be at least 0, which means no limit")
