"""The options of `mt data clean` and the named sets of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mt_core.errors import ConfigError, did_you_mean


class CleanOptions(BaseModel):
    """Which rules hold, and their thresholds. None, False or () turns a rule off; all are off by default.

    Sources: C4 = Raffel et al. 2020 (JMLR 21/140, section 2.2); Gopher = Rae et al. 2021 (arXiv 2112.11446,
    appendix A.1.1); OpenWebText = the recipe that Megatron-LM describes for its web text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    fix_text: bool = False
    """Repair encoding damage, HTML entities and control characters with ftfy (OpenWebText)"""

    # Lines
    remove_citations: bool = False
    """Delete citation marks such as [12], [edit] and [citation needed] (C4)"""
    terminal_punctuation: bool = False
    """Remove lines that end without . ! ? or a closing quotation mark (C4)"""
    min_words_per_line: int | None = None
    """Remove lines with fewer words (C4: 5)"""
    javascript_lines: bool = False
    """Remove lines with the word Javascript (C4)"""
    policy_lines: bool = False
    """Remove lines about cookies, terms of use and privacy policies (C4)"""
    repeated_lines: bool = False
    """Remove lines that stood earlier in the document; blank lines stay"""

    # Documents: length
    min_chars: int | None = None
    """Drop documents with fewer characters"""
    max_chars: int | None = None
    """Drop documents with more characters"""
    min_words: int | None = None
    """Drop documents with fewer words (Gopher: 50)"""
    max_words: int | None = None
    """Drop documents with more words (Gopher: 100,000)"""
    min_tokens: int | None = None
    """Drop documents with fewer tokens (OpenWebText: 128), counted by `tokenizer_file`"""
    tokenizer_file: Path | None = None
    """A tokenizer.json that counts the tokens; without it a run of letters, of digits or of marks is one token"""
    min_sentences: int | None = None
    """Drop documents with fewer sentence ends (C4: 3)"""

    # Documents: content
    lorem_ipsum: bool = False
    """Drop documents with the placeholder text "lorem ipsum" (C4)"""
    curly_brackets: bool = False
    """Drop documents with a curly bracket, which are mostly code (C4)"""
    blocked_words_file: Path | None = None
    """Drop documents with a word or phrase of this file, one a line (C4 uses a list of obscene words)"""
    min_mean_word_length: float | None = None
    """Drop documents whose words are shorter on average (Gopher: 3)"""
    max_mean_word_length: float | None = None
    """Drop documents whose words are longer on average (Gopher: 10)"""
    max_hash_ratio: float | None = None
    """Drop documents with more # marks a word (Gopher: 0.1)"""
    max_ellipsis_ratio: float | None = None
    """Drop documents with more ellipses a word (Gopher: 0.1)"""
    max_bullet_line_share: float | None = None
    """Drop documents with a larger share of lines that begin with a bullet (Gopher: 0.9)"""
    max_ellipsis_line_share: float | None = None
    """Drop documents with a larger share of lines that end with an ellipsis (Gopher: 0.3)"""
    min_alphabetic_word_share: float | None = None
    """Drop documents with a smaller share of words that hold a letter (Gopher: 0.8)"""
    min_stop_words: int | None = None
    """Drop documents with fewer different words of: the be to of and that have with (Gopher: 2; English only)"""

    # Documents: repetition
    max_duplicate_line_share: float | None = None
    """Drop documents with a larger share of lines that stood before (Gopher: 0.3)"""
    max_duplicate_line_char_share: float | None = None
    """Drop documents with a larger share of their characters in such lines (Gopher: 0.2)"""
    max_duplicate_paragraph_share: float | None = None
    """Drop documents with a larger share of paragraphs that stood before (Gopher: 0.3)"""
    max_duplicate_paragraph_char_share: float | None = None
    """Drop documents with a larger share of their characters in such paragraphs (Gopher: 0.2)"""
    top_ngrams: bool = False
    """Drop documents where the commonest 2-, 3- or 4-gram makes up over 0.20, 0.18 or 0.16 of them (Gopher)"""
    duplicate_ngrams: bool = False
    """Drop documents where repeated 5- to 10-grams make up over 0.15, 0.14, ... 0.10 of them (Gopher)"""

    # Documents: language
    languages: tuple[str, ...] = ()
    """Keep these languages (ISO 639-1 codes, with commas between), as py3langid says"""
    min_language_probability: float = 0.5
    """Drop documents whose language is less certain"""
    language_chars: int = 4096
    """How many characters of a document the language is found from"""

    def replace(self, settings: Iterable[str]) -> CleanOptions:
        """These options with `name=value` settings in place; "none" turns a rule off.

        Raises ConfigError for an unknown name or a value of the wrong type.
        """
        values = self.model_dump()
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not equals or name not in values:
                hint = did_you_mean(name, values)
                raise ConfigError(f"--set {setting!r} names no rule{hint}; write name=value, `--rules` lists the names")
            values[name] = _parse(name, value)
        try:
            return CleanOptions(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"--set {first['loc'][0]}={first['input']}: {first['msg']}") from error


def _parse(name: str, value: str) -> object:
    if name == "languages":
        return tuple(part.strip() for part in value.split(",") if part.strip() and value != "none")
    # Pydantic converts the other texts to the field's type and names the rule whose value does not fit.
    if value == "none":
        return CleanOptions.model_fields[name].default
    return value


_C4 = CleanOptions(
    remove_citations=True,
    terminal_punctuation=True,
    min_words_per_line=5,
    javascript_lines=True,
    policy_lines=True,
    min_sentences=3,
    lorem_ipsum=True,
    curly_brackets=True,
    languages=("en",),
)
_GOPHER = CleanOptions(
    min_words=50,
    max_words=100_000,
    min_mean_word_length=3,
    max_mean_word_length=10,
    max_hash_ratio=0.1,
    max_ellipsis_ratio=0.1,
    max_bullet_line_share=0.9,
    max_ellipsis_line_share=0.3,
    min_alphabetic_word_share=0.8,
    min_stop_words=2,
    max_duplicate_line_share=0.3,
    max_duplicate_line_char_share=0.2,
    max_duplicate_paragraph_share=0.3,
    max_duplicate_paragraph_char_share=0.2,
    top_ngrams=True,
    duplicate_ngrams=True,
)
PRESETS: dict[str, CleanOptions] = {
    "openwebtext": CleanOptions(fix_text=True, languages=("en",), min_tokens=128),
    "c4": _C4,
    "gopher": _GOPHER,
    "none": CleanOptions(),
}


def preset(name: str) -> CleanOptions:
    """A named set of options. Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise ConfigError(f"--preset {name!r} is not known{hint}; it can be {', '.join(PRESETS)}")
    return PRESETS[name]


# The options of `mt data dedup`.

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
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed {self.seed} is out of range; give 0 to 4294967295")
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


# The options of `mt data decontaminate`.


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
