"""Comparing texts with references: exact match, F1, BLEU and ROUGE."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

# -- exact match and F1 of short answers (Rajpurkar et al. 2016, SQuAD) ------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, references: Sequence[str]) -> float:
    """1 if the normalized text is one of the normalized references."""
    return float(normalized_answer(text) in {normalized_answer(reference) for reference in references})


def f1(text: str, references: Sequence[str]) -> float:
    """F1 of the words that the normalized texts share; the best over the references."""
    return max(_f1(normalized_answer(text).split(), normalized_answer(reference).split()) for reference in references)


def _f1(words: list[str], reference: list[str]) -> float:
    # SQuAD 2: of two empty answers F1 is 1, of one 0.
    if not words or not reference:
        return float(words == reference)
    shared = sum((Counter(words) & Counter(reference)).values())
    # 2 P R / (P + R) with P = shared / len(words), R = shared / len(reference).
    return 2 * shared / (len(words) + len(reference))


ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


def sentence_bleu(text: str, references: Sequence[str]) -> float:
    """From 0 to 100, with sacrebleu's smoothing for single sentences."""
    from sacrebleu.metrics import BLEU

    # effective_order: orders that a short sentence does not have are left out, else its score is 0.
    return float(BLEU(effective_order=True).sentence_score(text, list(references)).score)


def corpus_bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """From 0 to 100. references: of each text; they may be of different number."""
    from sacrebleu.metrics import BLEU

    # sacrebleu takes the first reference of each text, then the second of each, None where there is none.
    streams = [list(stream) for stream in zip_longest(*references)]
    return float(BLEU().corpus_score(list(texts), streams).score)


def rouge(text: str, references: Sequence[str]) -> dict[str, float]:
    """F-measures, from 0 to 1, with stemming; each of its best reference."""
    from rouge_score.rouge_scorer import RougeScorer

    scores = RougeScorer(ROUGE_TYPES, use_stemmer=True).score_multi(list(references), text)
    return {name: float(score.fmeasure) for name, score in scores.items()}
