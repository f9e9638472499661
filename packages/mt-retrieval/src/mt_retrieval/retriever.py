"""`Retriever`: questions in, passages out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, did_you_mean
from mt_data.records import Origin
from mt_retrieval.encoder import Encoder
from mt_retrieval.evidence import Evidence, Passage, open_evidence
from mt_retrieval.index import Index, SearchResult, open_index

BATCH = 128
"""Questions that are embedded and searched at a time."""


@dataclass(frozen=True)
class ScoredPassage:
    """score: inner product of the embeddings of the question and of the passage. row: of the evidence, from 0."""

    score: float
    row: int
    passage: Passage

    def as_record(self) -> dict[str, Any]:
        return {"score": self.score, **asdict(self.passage)}


class Retriever:
    """An encoder of questions, an index of embeddings, and the passages that were embedded.

    Raises ConfigError when the index is of another encoder or of other evidence, by their hashes.
    """

    def __init__(self, encoder: Encoder, index: Index, evidence: Evidence) -> None:
        if index.source is not None:
            # By hash, not by path: scores of vectors of two encoders mean nothing, and nothing else would show it.
            require_same("encoder", index.source.encoder, encoder.fingerprint, str(encoder.checkpoint))
        require_evidence(index, evidence)
        self.encoder, self.index, self.evidence = encoder, index, evidence

    @classmethod
    def open(
        cls,
        index: str | Path,
        *,
        checkpoint: str | Path | None = None,
        evidence: str | Path | None = None,
        device: str = "auto",
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        search_parameters: str | None = None,
    ) -> Retriever:
        """checkpoint, evidence: default to where they were when the passages were embedded."""
        opened = open_index(Path(index), search_parameters)
        encoder = Encoder.load(
            checkpoint or recorded(opened, "encoder", "--checkpoint"),
            device=device,
            settings=settings,
            # Questions are cut as passages were.
            seq_length=None if opened.source is None else opened.source.seq_length,
        )
        return cls(encoder, opened, evidence_of(str(evidence or recorded(opened, "evidence", "--evidence")), encoder))

    def search(self, questions: Sequence[str], k: int) -> list[list[ScoredPassage]]:
        """The k best passages of each question, the best first."""
        result = self.find(questions, k)
        return [
            [
                ScoredPassage(float(score), int(row), self.evidence.passage(int(row)))
                for score, row in zip(scores, rows, strict=True)
                if row >= 0
            ]
            for scores, rows in zip(*result, strict=True)
        ]

    def find(
        self, questions: Sequence[str], k: int, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> SearchResult:
        """The passages of `search` as rows of the evidence."""

        def vectors(first: int, end: int) -> NDArray[np.float32]:
            return self.encoder.questions(questions[first:end])

        return find_in_batches(self.index, vectors, len(questions), k, on_progress)


def find_in_batches(
    index: Index,
    vectors: Callable[[int, int], NDArray[np.float32]],
    count: int,
    k: int,
    on_progress: Callable[[int, int], None],
) -> SearchResult:
    """vectors: (first, end) -> embeddings [end - first, dim] of these questions. k is cut to the size of the index."""
    # faiss would fill up with -1.
    k = min(k, len(index))
    # For no questions: shapes stay [0, k].
    results = [SearchResult(np.zeros((0, k), np.float32), np.zeros((0, k), np.int64))]
    for first in range(0, count, BATCH):
        end = min(first + BATCH, count)
        results.append(index.search(require_width(vectors(first, end), index), k))
        on_progress(end, count)
    return SearchResult(*map(np.concatenate, zip(*results, strict=True)))


def require_width(questions: NDArray[np.float32], index: Index) -> NDArray[np.float32]:
    if questions.shape[1] != index.dim:
        raise ConfigError(
            f"the embeddings of questions have {questions.shape[1]} numbers, those of the index {index.dim}; both must "
            "be of one encoder"
        )
    return questions


def evidence_of(path: str, encoder: Encoder) -> Evidence:
    return open_evidence(path, encoder.tokenizer, encoder.seq_length, encoder.config.data)


def recorded(index: Index, what: Literal["encoder", "evidence"], option: str) -> str:
    """The path that the index has recorded. Raises ConfigError where it has none."""
    if index.source is None:
        raise ConfigError(f"the index does not say of which {what} it is; give {option}")
    origin: Origin = getattr(index.source, what)
    return origin.path


def require_evidence(index: Index, evidence: Evidence) -> None:
    """Raises ConfigError unless the evidence is what was indexed."""
    if index.source is not None:
        require_same("evidence", index.source.evidence, evidence.fingerprint(), evidence.name)
    if len(evidence) != len(index):
        raise ConfigError(
            f"{evidence.name} has {len(evidence)} passages and the index {len(index)}; give the evidence that was "
            "embedded (--evidence)"
        )


def require_same(what: str, origin: Origin, sha256: str, path: str) -> None:
    """sha256: of what is at `path`. Raises ConfigError unless it is the one that was embedded."""
    if sha256 != origin.sha256:
        option = "--checkpoint" if what == "encoder" else "--evidence"
        raise ConfigError(
            f"the index is of another {what}: SHA-256 {origin.sha256[:16]}... ({origin.path}), and {path} has "
            f"{sha256[:16]}...; give the {what} of the index with {option}, or embed the evidence again"
        )


# -- retriever for other distributions (`--retriever index` of `mt eval qa`) -------------------------

OPTIONS = ("path", "checkpoint", "evidence", "search_parameters")


@dataclass(frozen=True)
class IndexRetriever:
    """Implements mt_retrieval.passage_retrievers.PassageRetriever."""

    retriever: Retriever
    options: Mapping[str, str]

    def passages(self, questions: Sequence[str], k: int) -> list[list[tuple[str, str]]]:
        results = self.retriever.search(questions, k)
        return [[(scored.passage.title, scored.passage.text) for scored in passages] for passages in results]

    def description(self) -> Mapping[str, str]:
        return {"retriever": "index", **self.options, "evidence_hash": self.retriever.evidence.fingerprint()}


def build_index_retriever(options: Mapping[str, str], device: str) -> IndexRetriever:
    """options: those of `mt retrieve search`, path for its index. Raises ConfigError for others, or without a path."""
    for option in options:
        if option not in OPTIONS:
            hint = did_you_mean(option, OPTIONS)
            raise ConfigError(f"--retriever index has no option {option}{hint}; it has {', '.join(OPTIONS)}")
    if "path" not in options:
        raise ConfigError("--retriever index needs --retriever-option path=INDEX, an index of mt retrieve index")
    return IndexRetriever(
        Retriever.open(
            options["path"],
            checkpoint=options.get("checkpoint"),
            evidence=options.get("evidence"),
            device=device,
            search_parameters=options.get("search_parameters"),
        ),
        options,
    )
