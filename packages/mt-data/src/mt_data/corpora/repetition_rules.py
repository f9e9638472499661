"""Rules that drop documents which repeat themselves (Gopher, Rae et al. 2021, table A1).

A repeat is what stood earlier in the same document: the first occurrence is not counted.
Shares of characters leave the blanks between words out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mt_data.corpora.clean_options import CleanOptions
from mt_data.corpora.document import Document
from mt_data.corpora.document_rules import Rule
from mt_data.corpora.ngram_hashes import ngram_hashes

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
