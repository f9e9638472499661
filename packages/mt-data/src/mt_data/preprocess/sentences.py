"""Cutting text into sentences: by rules (the default; needs nothing), or by NLTK's Punkt when its data is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from mt_core.errors import ConfigError, DataError, did_you_mean
from mt_data.preprocess.abbreviations import LANGUAGES, Language

if TYPE_CHECKING:
    from mt_data.preprocess.options import Splitter

SplitSentences = Callable[[str], list[str]]
"""A text to its sentences. Without their white space, or (keep_newlines) such that joined they are the text."""

Spans = Callable[[str], Iterable[tuple[int, int]]]
"""A text to (begin, end) of its sentences, in order, without the white space between them."""

RULES_VERSION = 1
"""Grows when the rules cut any text differently: unfinished runs by other rules are not continued."""

_CLOSERS = "\"'”’»›)]}」』】》）"
_OPENERS = "\"'“‘„«‹([{「『【《（¿¡-–—•*"
_CLOSER, _OPENER = f"[{re.escape(_CLOSERS)}]", f"[{re.escape(_OPENERS)}]"
_WIDE_MARKS = "。！？｡"
"""Marks of scripts that write no space behind them."""
# No part of the pattern goes back over what it took, so that its time is linear in the text.
# Marks with closing quotes and brackets behind them, or a blank line. ++ and *+ are possessive (Python 3.11).
_CANDIDATE = re.compile(rf"[.!?…؟۔।॥{_WIDE_MARKS}]++{_CLOSER}*+|\n[^\S\n]*+\n")
_LAST_WORD = re.compile(r"\S*$")
_MAX_WORD = 40
"""Characters looked back for the word before a period; abbreviations are shorter."""
_NEXT_WORD = re.compile(rf"\s*{_OPENER}*([^\s.,;:]*)")


def build_splitter(splitter: Splitter, lang: str, keep_newlines: bool) -> SplitSentences:
    """The function that `--sentence-splitter` and `--lang` name. ConfigError for a language it has no rules for."""
    spans = _punkt_spans(lang) if splitter == "nltk" else _rule_spans(lang)
    if keep_newlines:
        return lambda text: _covering(text, spans(text))
    return lambda text: [text[begin:end] for begin, end in spans(text)]


def splitter_identity(splitter: Splitter, lang: str, keep_newlines: bool) -> str:
    """Names what decides where sentences end, so that data cut by different rules is distinguished."""
    if splitter == "nltk":
        import nltk

        return f"nltk {nltk.__version__} punkt {lang} keep_newlines={keep_newlines}"
    return f"rules {RULES_VERSION} {lang} keep_newlines={keep_newlines}"


def sentence_spans(text: str, language: Language) -> Iterator[tuple[int, int]]:
    """(begin, end) of each sentence, without the white space around it; a sentence is never empty."""
    begin = 0
    for match in _CANDIDATE.finditer(text):
        if _ends_sentence(text, begin, match, language):
            yield from _stripped(text, begin, match.end())
            begin = match.end()
    yield from _stripped(text, begin, len(text))


def _ends_sentence(text: str, begin: int, match: re.Match[str], language: Language) -> bool:
    candidate, end = match.group(), match.end()
    # A blank line and marks such as U+3002 end a sentence whatever follows; the rest needs white space behind it, which
    # excludes "3.14" and "example.com".
    mark = candidate[0]
    if mark == "\n" or candidate.rstrip(_CLOSERS)[-1] in _WIDE_MARKS:
        return True
    if not text[end : end + 1].isspace():
        return False
    following = _NEXT_WORD.match(text, end)
    next_word = following.group(1) if following else ""
    # The sentence goes on: "approx. ten", "Wait... what". In scripts without case no letter is a small one.
    if mark in ".!?…" and next_word[:1].islower():
        return False
    # "!", "?", "..." and a period with a quote behind it end the sentence; only a lone period may be an abbreviation's.
    if candidate != ".":
        return True
    # search with bounds instead of a slice; `end - 1` is the place of the period. $ matches at the given end.
    word = _LAST_WORD.search(text, max(begin, end - 1 - _MAX_WORD), end - 1)
    return word is None or _period_ends(text, word, next_word, language)


def _period_ends(text: str, found: re.Match[str], next_word: str, language: Language) -> bool:
    """Whether the period behind a word ends a sentence, when `next_word` follows and does not begin small."""
    word = found.group().lstrip(_OPENERS)
    lower = word.lower()
    if lower in language.titles or (len(word) == 1 and word.isupper() and word != "I"):
        return False  # "Dr. Smith", "J. Smith"
    if word.isdecimal():
        begins_line = found.start() == 0 or text[found.start() - 1] == "\n"
        return not begins_line and not (language.ordinal_period and len(word) <= 2)  # "1. Item", "3. Oktober"
    if "." in word or lower in language.abbreviations:
        return next_word.lower() in language.starters  # "the U.S. Army", but "in the U.S. The"
    return True


def _stripped(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    piece = text[begin:end]
    left = len(piece) - len(piece.lstrip())
    if left < len(piece):
        yield begin + left, begin + len(piece.rstrip())


def _covering(text: str, spans: Iterable[tuple[int, int]]) -> list[str]:
    """The text cut where the sentences after the first begin."""
    # The first sentence takes the white space before it too, so that nothing of the text is lost.
    cuts = [0, *[begin for begin, _ in spans][1:], len(text)]
    return [text[begin:end] for begin, end in pairwise(cuts) if begin < end]


def _rule_spans(lang: str) -> Spans:
    if lang not in LANGUAGES:
        raise ConfigError(
            f"--lang {lang}: there are rules for {', '.join(LANGUAGES)}{did_you_mean(lang, LANGUAGES)}; "
            "generic serves any other"
        )
    language = LANGUAGES[lang]
    return lambda text: sentence_spans(text, language)


def _punkt_spans(lang: str) -> Spans:
    try:
        from nltk.tokenize import PunktTokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--sentence-splitter nltk needs NLTK (pip install nltk, or mt-data[nltk]); --sentence-splitter rules "
            "needs nothing"
        ) from error
    try:
        return PunktTokenizer(lang).span_tokenize
    except LookupError as error:
        raise DataError(
            f'NLTK has no Punkt data for "{lang}" on this machine (python -m nltk.downloader punkt_tab gets it); '
            "--sentence-splitter rules needs none"
        ) from error
