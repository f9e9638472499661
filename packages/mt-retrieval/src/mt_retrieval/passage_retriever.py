"""An index of embedded passages as a retriever of other distributions (`--retriever index` of `mt eval qa`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mt_core.errors import ConfigError, did_you_mean
from mt_retrieval.retriever import Retriever

OPTIONS = ("path", "checkpoint", "evidence", "search_parameters")


@dataclass(frozen=True)
class IndexRetriever:
    """Implements mt_core.specs.PassageRetriever."""

    retriever: Retriever
    options: Mapping[str, str]

    def passages(self, questions: Sequence[str], k: int) -> list[list[tuple[str, str]]]:
        found = self.retriever.search(questions, k)
        return [[(one.passage.title, one.passage.text) for one in passages] for passages in found]

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
