"""Words as near-duplicate and overlap search see them: lower case, no punctuation."""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache

# Scripts written without spaces between words: each character is taken as a word. Han, kana, Bopomofo, Yi, Thai,
# Lao, Tibetan, Myanmar, Khmer, and the Han of the second plane.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u30ff\u3100-\u312f\u3400-\u4dbf\u4e00-\u9fff"
_UNSPACED += "\ua000-\ua4cf\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
_ASTRAL = "\U00010000"
_ASCII_MARKS = str.maketrans("", "", string.punctuation)
# A kana's voicing mark may be a character of its own, behind it.
_VOICING = "\u3099\u309a\uff9e\uff9f"
_TOKEN = re.compile(f"[{_UNSPACED}][{_VOICING}]*|[^\\s{_UNSPACED}]+")


@cache
def _punctuation() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The Unicode categories P (punctuation) and S (symbols), below and from U+10000 on.

    Two patterns, since a set of characters is a table only where it has none beyond U+FFFF, else a slow search.
    """
    marks = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] in "PS"]
    low, high = [mark for mark in marks if mark < _ASTRAL], [mark for mark in marks if mark >= _ASTRAL]
    return re.compile(f"[{re.escape(''.join(low))}]+"), re.compile(f"[{re.escape(''.join(high))}]+")


def without_punctuation(text: str) -> str:
    if text.isascii():
        return text.translate(_ASCII_MARKS)
    low, high = _punctuation()
    text = low.sub("", text)
    return high.sub("", text) if max(text, default="") >= _ASTRAL else text


def normalized_words(text: str) -> list[str]:
    """The words of a text in lower case without punctuation; what is punctuation alone is no word.

    Compared in Unicode's form NFKC, so that composed and decomposed characters, ligatures and full-width letters are
    the same words. This is GPT-3's gram (Brown et al. 2020, appendix C: "a lowercase, whitespace delimited word with no
    punctuation"), except that in scripts without spaces each character is a word.
    """
    if text.isascii():
        return without_punctuation(text.lower()).split()
    # Cut first: a mark may stand between two words of a script without spaces.
    if unicodedata.is_normalized("NFKC", text):
        return [word for token in _TOKEN.findall(text.lower()) if (word := without_punctuation(token))]
    return [word for token in _TOKEN.findall(text) if (word := _normalized(token))]


def _normalized(token: str) -> str:
    """As one word, although some characters have spaces in NFKC; punctuation of either form is left out."""
    compatible = unicodedata.normalize("NFKC", without_punctuation(token))
    return without_punctuation("".join(compatible.lower().split()))


def iter_word_spans(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) in `text` of each of its `normalized_words`, punctuation at the word included."""
    for match in _TOKEN.finditer(text):
        if _normalized(match.group()):
            yield match.span()
