"""Recall at k: the share of questions with an answer in one of the first k passages."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import regex
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_data.questions import Question
from mt_retrieval.encoder import computation, versions
from mt_retrieval.evidence import Evidence, TSVEvidence
from mt_retrieval.index import Index, SearchResult, open_index, read_matrix
from mt_retrieval.retriever import Retriever, find_in_batches, recorded, require_evidence

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Recall:
    """first_hits: for each question the rank (from 0) of the first passage with an answer, -1 without one."""

    first_hits: NDArray[np.int64]

    def at(self, k: int) -> float:
        # The same search serves every k: found with the largest, counted for each.
        return float(((self.first_hits >= 0) & (self.first_hits < k)).mean())


def measure_recall(
    questions: Sequence[Question],
    rows: NDArray[np.int64],
    evidence: Evidence,
    match: Match = "string",
    on_progress: OnProgress = lambda done, total: None,
) -> Recall:
    """rows: [questions, k] of the evidence, the best first; -1 is no passage."""
    hits = np.full(len(questions), -1)
    for number, (question, candidates) in enumerate(zip(questions, rows, strict=True)):
        hits[number] = _first_hit(question, candidates, evidence, match)
        on_progress(number + 1, len(questions))
    return Recall(hits)


def _first_hit(question: Question, rows: NDArray[np.int64], evidence: Evidence, match: Match) -> int:
    for rank, row in enumerate(rows.tolist()):
        # In the order of the scores: the first hit decides recall at every k.
        if row >= 0 and has_answer(question.answers, evidence.passage(row).text, match):
            return rank
    return -1


class Searcher(Protocol):
    """Finds passages for questions, and records with what."""

    @property
    def evidence(self) -> Evidence: ...

    def find(self, questions: Sequence[Question], k: int, on_progress: OnProgress) -> SearchResult: ...

    def origin(self, questions: Path) -> dict[str, Any]:
        """What a result file records: JSON values."""
        ...


@dataclass(frozen=True)
class EncodedQuestions:
    """Questions that the retriever's encoder embeds."""

    retriever: Retriever

    @property
    def evidence(self) -> Evidence:
        return self.retriever.evidence

    def find(self, questions: Sequence[Question], k: int, on_progress: OnProgress) -> SearchResult:
        return self.retriever.find([question.text for question in questions], k, on_progress)

    def origin(self, questions: Path) -> dict[str, Any]:
        encoder = self.retriever.encoder
        return {
            **_origin(self.retriever.index, self.evidence, questions),
            "checkpoint": {"path": str(encoder.checkpoint), "sha256": encoder.fingerprint},
            "made_with": computation(encoder.config, encoder.ctx),
        }


@dataclass(frozen=True)
class EmbeddedQuestions:
    """Questions whose embeddings are read from a file; row i is that of question i."""

    index: Index
    matrix: NDArray[np.floating]
    evidence: TSVEvidence
    path: Path

    @classmethod
    def open(
        cls, index: Path, embeddings: Path, evidence: str | None, search_parameters: str | None
    ) -> EmbeddedQuestions:
        opened = open_index(index, search_parameters)
        passages = TSVEvidence(Path(evidence or recorded(opened, "evidence", "--evidence")))
        require_evidence(opened, passages)
        return cls(opened, read_matrix(embeddings), passages, embeddings)

    def find(self, questions: Sequence[Question], k: int, on_progress: OnProgress) -> SearchResult:
        if len(questions) != len(self.matrix):
            raise ConfigError(
                f"--question-embeddings {self.path} has {len(self.matrix)} rows for {len(questions)} questions"
            )
        # Files may be fp16; products are in fp32.
        matrix = self.matrix.astype(np.float32)
        return find_in_batches(self.index, lambda first, end: matrix[first:end], len(matrix), k, on_progress)

    def origin(self, questions: Path) -> dict[str, Any]:
        return {
            **_origin(self.index, self.evidence, questions),
            "question_embeddings": _file(self.path),
            "made_with": {"versions": versions()},
        }


def _origin(index: Index, evidence: Evidence, questions: Path) -> dict[str, Any]:
    return {
        "index": index.kind,
        "embedded": index.source and index.source.model_dump(),
        "evidence": {"path": evidence.name, "sha256": evidence.fingerprint(), "passages": len(evidence)},
        "questions_file": _file(questions),
    }


def _file(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            return {"path": str(path), "sha256": file_digest(file, "sha256").hexdigest()}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


# -- answers in passages, as in DPR's evaluation (Karpukhin et al., 2020) ----------------------------
#
# Both sides are in Unicode's normal form D, so that accents count. By string: the answer's tokens, in lower case, are a
# contiguous part of the passage's. By regex: the answer is a pattern, found in the passage whatever its case. Titles
# are not searched.

Match = Literal["string", "regex"]
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
"""A run of letters, numbers and marks, or any other character that is neither a separator nor a control character."""
_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE


def has_answer(answers: Sequence[str], text: str, match: Match = "string") -> bool:
    """Whether the text has one of the answers. A pattern that is not valid is not found."""
    if match == "regex":
        text = unicodedata.normalize("NFD", text)
        return any(_matches(unicodedata.normalize("NFD", answer), text) for answer in answers)
    tokens = normalized_tokens(text)
    return any(_contains(tokens, normalized_tokens(answer)) for answer in answers)


def normalized_tokens(text: str) -> tuple[str, ...]:
    return tuple(token.lower() for token in _TOKEN.findall(unicodedata.normalize("NFD", text)))


def _contains(tokens: Sequence[str], part: Sequence[str]) -> bool:
    size = len(part)
    # An answer of no tokens is found in every text, as in DPR.
    return any(tokens[first : first + size] == part for first in range(len(tokens) - size + 1))


def _matches(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, _FLAGS) is not None
    except regex.error:
        return False
