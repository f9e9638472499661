"""The options of `mt data clean` and the named sets of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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
