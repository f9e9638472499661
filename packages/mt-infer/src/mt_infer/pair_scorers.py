"""Models that score an answer to a prompt: /score and /rerank ask them in place of the cosine of two embeddings.

mt-infer knows no such model itself: a distribution registers what makes a scorer of a loaded model
(`mt_register_pair_scorers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mt_core.kinds import Kind, Lazy, Spec
from mt_core.plugins import PluginHost

if TYPE_CHECKING:
    from mt_core.interfaces import Tokenizer
    from mt_core.train.trained_model import TrainedModel


class PairScorer(Protocol):
    """Scores of texts, on one process."""

    tokenizer: Tokenizer
    longest: int
    """Tokens of a prompt with its answer."""

    def pair_tokens(self, prompt: str, answer: str) -> list[int]:
        """Raises ConfigError for more than the model takes."""
        ...

    def pair_scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Score of each pair of texts, given by its tokens."""
        ...


class BuildPairScorer(Protocol):
    def __call__(self, trained: TrainedModel) -> PairScorer | None:
        """None for a model that is none of its kind."""
        ...


@dataclass(frozen=True, kw_only=True)
class PairScorerSpec(Spec):
    """A kind of models that `mt serve` scores prompts and answers with."""

    build: Lazy[BuildPairScorer]


PAIR_SCORERS = Kind("pair_scorers", "a scorer of pairs", PairScorerSpec, "mt-tune")


def pair_scorer_of(trained: TrainedModel, host: PluginHost) -> PairScorer | None:
    """The scorer that a plugin makes of a model; None for a model of another kind."""
    built = (spec.build.load()(trained) for spec in host[PAIR_SCORERS])
    return next((scorer for scorer in built if scorer is not None), None)
