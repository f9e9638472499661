"""The options of `mt data dedup`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mt_core.errors import ConfigError

Method = Literal["exact", "minhash"]
Normalization = Literal["none", "blanks", "words"]


@dataclass(frozen=True)
class DedupOptions:
    """method: "exact" compares whole texts, "minhash" finds texts with near the same n-grams.

    normalize: what exact comparison overlooks: nothing, the kind and number of blanks, or these, case and
    punctuation.
    threshold: the Jaccard similarity of their sets of n-grams from which two texts count as the same.
    num_perm: MinHash values a document; the estimated similarity errs by about sqrt(s (1 - s) / num_perm).
    ngram, unit: length of the n-grams, in words or characters.
    bands, rows: of the LSH table; by default those that suit the threshold; see `dedup_minhash.table_shape`.
    verify: compare the estimated similarity of candidates with the threshold; otherwise all candidates count.
    memory_bytes: what sorting may take, besides 8 bytes a document for "minhash".
    """

    method: Method = "minhash"
    normalize: Normalization = "blanks"
    threshold: float = 0.8
    num_perm: int = 128
    ngram: int = 5
    unit: Literal["word", "char"] = "word"
    seed: int = 1
    bands: int | None = None
    rows: int | None = None
    verify: bool = True
    memory_bytes: int = 2**30

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"--{name} {getattr(self, name)!r} is not known; give {', '.join(allowed)}")
        if not 0 < self.threshold < 1:
            raise ConfigError(f"--threshold {self.threshold} is out of range; give a similarity between 0 and 1")
        if self.ngram < 1 or self.num_perm < 2:
            raise ConfigError(f"--ngram {self.ngram} and --num-perm {self.num_perm}: give at least 1 and 2")
        if self.memory_bytes < 2**20:
            raise ConfigError("--memory-mb is too small; give at least 1")
        if (self.bands is None) != (self.rows is None):
            raise ConfigError("--bands and --rows belong together; give both or neither")
        if self.bands is not None and self.rows is not None and not self._table_fits(self.bands, self.rows):
            raise ConfigError(
                f"--bands {self.bands} x --rows {self.rows} must be at least 1 x 1 "
                f"and at most --num-perm {self.num_perm}"
            )

    def _table_fits(self, bands: int, rows: int) -> bool:
        return bands >= 1 and rows >= 1 and bands * rows <= self.num_perm


_CHOICES = {
    "method": ("exact", "minhash"),
    "normalize": ("none", "blanks", "words"),
    "unit": ("word", "char"),
}
