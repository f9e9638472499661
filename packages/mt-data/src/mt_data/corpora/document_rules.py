"""Rules that drop whole documents for their length or content.

Each takes a document and the options, and gives None, or what it found as a short text for the report.
The rule's name is the reason under which documents are counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mt_data.corpora.clean_options import CleanOptions
from mt_data.corpora.document import Document

Rule = Callable[[Document, CleanOptions], "str | None"]

# The eight words of Gopher's rule.
STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLETS = ("\u2022", "\u2023", "\u25e6", "\u25aa", "\u25cf", "\u25cb", "\u25a0", "\u00b7", "-", "*")
_ELLIPSES = ("...", "\u2026")
_SENTENCE_END = re.compile("[.!?][\"')\\]\u201d\u2019]*(?=\\s|$)|[\u3002\uff01\uff1f]")


def too_few_chars(document: Document, options: CleanOptions) -> str | None:
    """Fewer characters than `min_chars`."""
    return _below(len(document.text), options.min_chars, "characters")


def too_many_chars(document: Document, options: CleanOptions) -> str | None:
    """More characters than `max_chars`."""
    return _above(len(document.text), options.max_chars, "characters")


def too_few_words(document: Document, options: CleanOptions) -> str | None:
    """Fewer words than `min_words`. Source: Gopher."""
    return None if options.min_words is None else _below(len(document.words), options.min_words, "words")


def too_many_words(document: Document, options: CleanOptions) -> str | None:
    """More words than `max_words`. Source: Gopher."""
    return None if options.max_words is None else _above(len(document.words), options.max_words, "words")


def too_few_sentences(document: Document, options: CleanOptions) -> str | None:
    """Fewer ends of sentences than `min_sentences`. Source: C4."""
    if options.min_sentences is None:
        return None
    return _below(len(_SENTENCE_END.findall(document.text)), options.min_sentences, "sentences")


def lorem_ipsum(document: Document, options: CleanOptions) -> str | None:
    """The placeholder text of printers. Source: C4."""
    return "found" if options.lorem_ipsum and "lorem ipsum" in document.text.lower() else None


def curly_bracket(document: Document, options: CleanOptions) -> str | None:
    """A curly bracket stands in code and hardly anywhere else. Source: C4."""
    return "found" if options.curly_brackets and "{" in document.text else None


def mean_word_length(document: Document, options: CleanOptions) -> str | None:
    """Words too short or too long on average. Source: Gopher."""
    if (options.min_mean_word_length, options.max_mean_word_length) == (None, None):
        return None
    mean = float(document.word_lengths.mean()) if document.words else 0.0
    unit = "characters a word"
    return _below(mean, options.min_mean_word_length, unit) or _above(mean, options.max_mean_word_length, unit)


def hash_ratio(document: Document, options: CleanOptions) -> str | None:
    """Too many # marks for the number of words. Source: Gopher."""
    if options.max_hash_ratio is None:
        return None
    return _above(document.text.count("#") / max(1, len(document.words)), options.max_hash_ratio, "# a word")


def ellipsis_ratio(document: Document, options: CleanOptions) -> str | None:
    """Too many ellipses for the number of words. Source: Gopher."""
    if options.max_ellipsis_ratio is None:
        return None
    ellipses = sum(document.text.count(mark) for mark in _ELLIPSES)
    return _above(ellipses / max(1, len(document.words)), options.max_ellipsis_ratio, "ellipses a word")


def bullet_lines(document: Document, options: CleanOptions) -> str | None:
    """Too many lines that begin with a bullet. Source: Gopher."""
    if options.max_bullet_line_share is None:
        return None
    bullets = sum(line.startswith(_BULLETS) for line in document.lines)
    return _above(bullets / max(1, len(document.lines)), options.max_bullet_line_share, "of the lines")


def ellipsis_lines(document: Document, options: CleanOptions) -> str | None:
    """Too many lines that end with an ellipsis. Source: Gopher."""
    if options.max_ellipsis_line_share is None:
        return None
    cut = sum(line.endswith(_ELLIPSES) for line in document.lines)
    return _above(cut / max(1, len(document.lines)), options.max_ellipsis_line_share, "of the lines")


def alphabetic_words(document: Document, options: CleanOptions) -> str | None:
    """Too few words that hold a letter. Source: Gopher."""
    if options.min_alphabetic_word_share is None:
        return None
    with_letter = sum(any(map(str.isalpha, word)) for word in document.words)
    share = with_letter / max(1, len(document.words))
    return _below(share, options.min_alphabetic_word_share, "of the words")


def stop_words(document: Document, options: CleanOptions) -> str | None:
    """Too few different English stop words: no running text. Source: Gopher."""
    if options.min_stop_words is None:
        return None
    found = STOP_WORDS.intersection(word.strip(".,;:!?\"'()").lower() for word in document.words)
    return _below(len(found), options.min_stop_words, "stop words")


DOCUMENT_RULES: tuple[Rule, ...] = (
    too_few_chars,
    too_many_chars,
    too_few_words,
    too_many_words,
    too_few_sentences,
    lorem_ipsum,
    curly_bracket,
    mean_word_length,
    hash_ratio,
    ellipsis_ratio,
    bullet_lines,
    ellipsis_lines,
    alphabetic_words,
    stop_words,
)


def _below(value: float, minimum: float | None, unit: str) -> str | None:
    return f"{value:.4g} {unit}, minimum {minimum:g}" if minimum is not None and value < minimum else None


def _above(value: float, maximum: float | None, unit: str) -> str | None:
    return f"{value:.4g} {unit}, maximum {maximum:g}" if maximum is not None and value > maximum else None
