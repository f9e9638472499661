"""Rules that drop documents for length, content, repetition or language, and rules that remove single lines.

Each takes a document and the options, and gives None, or what it found as a short text for the report.
The rule's name is the reason under which documents are counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, did_you_mean
from mt_data.corpora.clean_options import CleanOptions
from mt_data.corpora.requires import require
from mt_data.corpora.words import U64, ngram_hashes, word_hashes

# -- documents ---------------------------------------------------------------------------------------


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
    present = STOP_WORDS.intersection(word.strip(".,;:!?\"'()").lower() for word in document.words)
    return _below(len(present), options.min_stop_words, "stop words")


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


# -- repetition within a document (Gopher, Rae et al. 2021, table A1) --------------------------------
#
# A repeat is what stood earlier in the same document: the first occurrence is not counted.
# Shares of characters leave the blanks between words out.

TOP_NGRAM_SHARES = {2: 0.20, 3: 0.18, 4: 0.16}
DUPLICATE_NGRAM_SHARES = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


def duplicate_shares(parts: list[str]) -> tuple[float, float]:
    """(share of the parts that are repeats, share of the characters in them); (0, 0) for no parts."""
    seen: set[str] = set()
    count = characters = 0
    for part in parts:
        if part in seen:
            count += 1
            characters += len(part)
        seen.add(part)
    return count / max(1, len(parts)), characters / max(1, sum(map(len, parts)))


def duplicate_lines(document: Document, options: CleanOptions) -> str | None:
    """Too many repeated lines, or too many characters in them."""
    limits = options.max_duplicate_line_share, options.max_duplicate_line_char_share
    return _shares_above(document.lines, *limits) if limits != (None, None) else None


def duplicate_paragraphs(document: Document, options: CleanOptions) -> str | None:
    """Too many repeated paragraphs, or too many characters in them."""
    limits = options.max_duplicate_paragraph_share, options.max_duplicate_paragraph_char_share
    return _shares_above(document.paragraphs, *limits) if limits != (None, None) else None


def top_ngram(document: Document, options: CleanOptions) -> str | None:
    """The commonest 2-, 3- or 4-gram of words makes up too much."""
    if not options.top_ngrams:
        return None
    return _first_above(document, TOP_NGRAM_SHARES, top_ngram_share, "the commonest {}-gram")


def duplicate_ngram(document: Document, options: CleanOptions) -> str | None:
    """Repeated 5- to 10-grams of words make up too much."""
    if not options.duplicate_ngrams:
        return None
    return _first_above(document, DUPLICATE_NGRAM_SHARES, duplicate_ngram_share, "repeated {}-grams")


REPETITION_RULES: tuple[Rule, ...] = (duplicate_lines, duplicate_paragraphs, top_ngram, duplicate_ngram)


def top_ngram_share(document: Document, n: int) -> float:
    """Occurrences x length of the commonest n-gram (of several, the longest) over all characters; 0 if none repeats."""
    # For each different n-gram: the word at which it first begins, and how often it occurs in the document.
    _, first, counts = np.unique(ngram_hashes(document.word_hashes, n), return_index=True, return_counts=True)
    if not counts.size or counts.max() == 1:
        return 0.0
    # int64 [words + 1]: characters of words before each word.
    ends = np.concatenate([[0], np.cumsum(document.word_lengths)])
    starts = first[counts == counts.max()]
    return float(counts.max() * (ends[starts + n] - ends[starts]).max() / ends[-1])


def duplicate_ngram_share(document: Document, n: int) -> float:
    """The share of the characters in words that a repeated n-gram covers, each word counted once."""
    hashes = ngram_hashes(document.word_hashes, n)
    repeated = np.ones(len(hashes), bool)
    # return_index gives the first occurrence of each n-gram, which is no repeat.
    repeated[np.unique(hashes, return_index=True)[1]] = False
    if not repeated.any():
        return 0.0
    starts = np.flatnonzero(repeated)
    steps = np.zeros(len(document.words) + 1, np.int64)
    # +1 at the first word of each repeated n-gram, -1 behind its last: the running sum is the number that cover a word.
    steps[starts] += 1
    np.subtract.at(steps, starts + n, 1)
    covered = np.cumsum(steps)[:-1] > 0
    return float(document.word_lengths[covered].sum() / document.word_lengths.sum())


def _shares_above(parts: list[str], max_share: float | None, max_char_share: float | None) -> str | None:
    share, char_share = duplicate_shares(parts)
    if max_share is not None and share > max_share:
        return f"{share:.3f} of them, maximum {max_share:g}"
    if max_char_share is not None and char_share > max_char_share:
        return f"{char_share:.3f} of the characters, maximum {max_char_share:g}"
    return None


def _first_above(
    document: Document, limits: dict[int, float], measure: Callable[[Document, int], float], what: str
) -> str | None:
    for n, maximum in limits.items():
        share = measure(document, n)
        if share > maximum:
            return f"{what.format(n)} make up {share:.3f}, maximum {maximum:g}"
    return None


# -- language, by py3langid: a model of 139 languages (4 MB) that needs only NumPy -------------------


class LanguageRule:
    """Drops documents in other languages than `options.languages`, or in a language that is not certain enough.

    The probability is of the most likely language among all of the model. Raises ConfigError for a
    language code that the model does not know.
    """

    def __init__(self, options: CleanOptions) -> None:
        self.identifier = language_identifier()
        known = set(self.identifier.labels)
        for language in options.languages:
            if language not in known:
                hint = did_you_mean(language, known)
                raise ConfigError(f"languages={language!r} is not known{hint}; give a code such as en, de or zh")

    def __call__(self, document: Document, options: CleanOptions) -> str | None:
        language, probability = self.identifier.classify(document.text[: options.language_chars])
        if language not in options.languages:
            return f"{language} with probability {probability:.2f}"
        if probability < options.min_language_probability:
            return f"{language} with probability {probability:.2f} only, minimum {options.min_language_probability:g}"
        return None


@cache
def language_identifier() -> Any:
    """py3langid's own model, whose file takes 0.3 s to unpack: once for the check of the options and for the work."""
    langid = require("py3langid.langid")
    # norm_probs gives probabilities; without it py3langid returns unnormalized log scores.
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


# -- single lines; each rule says of a line whether it is removed ------------------------------------

_CITATIONS = re.compile(r"\[(?:\d+|edit|citation needed)\]")
_TERMINAL = (".", "!", "?", '"', "'", "\u201d", "\u2019", "\u00bb", "\u3002", "\uff01", "\uff1f", "\u300d", "\u2026")
_POLICIES = re.compile(r"terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies", re.I)

LineRule = Callable[[str], bool]


def remove_citations(text: str) -> tuple[str, int]:
    """The text without the citation marks of Wikipedia, and how many there were. Source: C4."""
    return _CITATIONS.subn("", text)


def no_terminal_punctuation(line: str) -> bool:
    """The line ends otherwise than a sentence; an ellipsis of three dots is no end. Source: C4."""
    return not line.endswith(_TERMINAL) or line.endswith("...")


def mentions_javascript(line: str) -> bool:
    """A line about turning Javascript on. Source: C4."""
    return "javascript" in line.lower()


def mentions_policy(line: str) -> bool:
    """A line of legal boilerplate. Source: C4 (its code; the paper names "privacy policy" and "cookies")."""
    return _POLICIES.search(line) is not None


def line_rules(options: CleanOptions) -> dict[str, LineRule]:
    """The rules that are on, by the name under which removed lines are counted. Sources: C4.

    A line counts under the first rule it breaks.
    """
    rules: dict[str, LineRule] = {}
    if options.terminal_punctuation:
        rules["line_without_terminal_punctuation"] = no_terminal_punctuation
    if (minimum := options.min_words_per_line) is not None:
        rules["line_with_few_words"] = lambda line: len(line.split()) < minimum
    if options.javascript_lines:
        rules["line_about_javascript"] = mentions_javascript
    if options.policy_lines:
        rules["line_about_policies"] = mentions_policy
    return rules


def filter_lines(text: str, rules: dict[str, LineRule], repeated: bool) -> tuple[str, dict[str, int]]:
    """The text without the lines that a rule (or `repeated`: an earlier line of the same text) removes, and counts.

    Blank lines stay, since they separate paragraphs; where nothing is removed the text is unchanged.
    """
    kept, removed, seen = [], dict[str, int](), set[str]()
    for line in text.split("\n"):
        bare = line.strip()
        reason = next((name for name, rule in rules.items() if rule(bare)), None) if bare else None
        if repeated and bare and reason is None:
            reason = "repeated_line" if bare in seen else None
            # Lines that a rule removes do not count as seen.
            seen.add(bare)
        if reason is None:
            kept.append(line)
        else:
            removed[reason] = removed.get(reason, 0) + 1
    return ("\n".join(kept) if removed else text), removed
