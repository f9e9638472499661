"""Hard negatives: passages that a retriever finds for a question, and that do not answer it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mt_core.paths import write_whole
from mt_retrieval.dpr import Context, TrainingQuestion, read_training_questions
from mt_retrieval.evaluation import has_answer, normalized_tokens
from mt_retrieval.retriever import Retriever, ScoredPassage

CANDIDATES = 4
"""Passages that are looked at for each negative that is requested."""


def mine_negatives(
    retriever: Retriever,
    questions: Path,
    target: Path,
    count: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Writes a file in DPR's format with the questions, their positives, and up to `count` mined hard negatives each,
    the highest scores first. Returns the number of negatives.

    A passage that has one of the answers (by string), or is one of the positives, is none.
    """
    asked = read_training_questions(questions)
    # More than are kept: candidates with an answer, and positives, are left out below.
    result = retriever.find([question.question for question in asked], count * CANDIDATES, on_progress)
    records, total = [], 0
    for question, rows, scores in zip(asked, result.rows.tolist(), result.scores.tolist(), strict=True):
        candidates = (
            ScoredPassage(score, row, retriever.evidence.passage(row))
            for row, score in zip(rows, scores, strict=True)
            if row >= 0
        )
        negatives = list(_first(candidates, question, count))
        total += len(negatives)
        records.append(_record(question, negatives))
    write_whole(target, json.dumps(records, ensure_ascii=False, indent=1).encode())
    return total


def _first(candidates: Iterable[ScoredPassage], question: TrainingQuestion, count: int) -> Iterable[ScoredPassage]:
    # By content: the evidence and the questions' file number and space the same passage differently.
    positives = {_content(positive.text) for positive in question.positives}
    for candidate in candidates:
        if count == 0:
            return
        text = candidate.passage.text
        if _content(text) not in positives and not has_answer(question.answers, text):
            count -= 1
            yield candidate


def _content(text: str) -> str:
    """Normalized text, equal for passages that differ only in spaces or case."""
    return " ".join(normalized_tokens(text))


def _record(question: TrainingQuestion, negatives: Iterable[ScoredPassage]) -> dict[str, Any]:
    return {
        "question": question.question,
        "answers": list(question.answers),
        "positive_ctxs": [_context(positive) for positive in question.positives],
        "negative_ctxs": [_context(negative) for negative in question.negatives],
        "hard_negative_ctxs": [
            {
                "title": negative.passage.title,
                "text": negative.passage.text,
                "score": negative.score,
                "passage_id": str(negative.passage.id),
            }
            for negative in negatives
        ],
    }


def _context(context: Context) -> dict[str, str]:
    known = {} if context.id is None else {"passage_id": context.id}
    return {"title": context.title, "text": context.text, **known}
