"""BLEU and ROUGE, by the packages sacrebleu and rouge-score."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


def sentence_bleu(text: str, references: Sequence[str]) -> float:
    """From 0 to 100, with sacrebleu's smoothing for single sentences."""
    # effective_order: orders that a short sentence does not have are left out, else its score is 0.
    return float(BLEU(effective_order=True).sentence_score(text, list(references)).score)


def corpus_bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """From 0 to 100. references: of each text; they may be of different number."""
    # sacrebleu takes the first reference of each text, then the second of each, None where there is none.
    streams = [list(stream) for stream in zip_longest(*references)]
    return float(BLEU().corpus_score(list(texts), streams).score)


def rouge(text: str, references: Sequence[str]) -> dict[str, float]:
    """F-measures, from 0 to 1, with stemming; each of its best reference."""
    found = RougeScorer(ROUGE_TYPES, use_stemmer=True).score_multi(list(references), text)
    return {name: float(score.fmeasure) for name, score in found.items()}
