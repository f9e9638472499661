"""Judges of texts, which plugins register by `mt_register_text_scorers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mt_core.kinds import Kind, Lazy, Spec


class TextScorer(Protocol):
    """Judges texts, for instance how toxic they are."""

    def scores(self, texts: Sequence[str]) -> list[Mapping[str, float] | None]:
        """For each text attribute -> score from 0 to 1; None for a text that cannot be judged."""
        ...


class BuildTextScorer(Protocol):
    def __call__(self, options: Mapping[str, str], host: Any) -> TextScorer:
        """options: as the user gave them. host: the PluginHost. Raises ConfigError for unknown or missing options."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextScorerSpec(Spec):
    """A judge of texts, selected by --scorer of mt eval."""

    build: Lazy[BuildTextScorer]


TEXT_SCORERS = Kind("text_scorers", "a text scorer", TextScorerSpec, "mt-eval")
