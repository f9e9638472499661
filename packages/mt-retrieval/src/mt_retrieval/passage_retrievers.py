"""Searches for passages, which plugins register by `mt_register_passage_retrievers`; `mt eval qa` asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mt_core.kinds import Kind, Lazy, Spec


class PassageRetriever(Protocol):
    """Finds passages for questions."""

    def passages(self, questions: Sequence[str], k: int) -> list[list[tuple[str, str]]]:
        """For each question the (title, text) of k passages at most, the best first."""
        ...

    def description(self) -> Mapping[str, Any]:
        """JSON values that say what is searched, for results."""
        ...


class BuildPassageRetriever(Protocol):
    def __call__(self, options: Mapping[str, str], device: str) -> PassageRetriever:
        """options: as the user gave them. device: auto, cpu or cuda. Raises ConfigError for unknown or missing
        options."""
        ...


@dataclass(frozen=True, kw_only=True)
class PassageRetrieverSpec(Spec):
    """A search for passages, selected by --retriever of mt eval."""

    build: Lazy[BuildPassageRetriever]


PASSAGE_RETRIEVERS = Kind("passage_retrievers", "a retriever of passages", PassageRetrieverSpec, "mt-retrieval")
