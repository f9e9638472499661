"""What is judged and what comes of it: samples, the table of rewards, and the error of a function that fails.

Worker processes import this module: nothing heavy is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_core.errors import TrainingError

Message = Mapping[str, Any]
Text = str | Sequence[Message]
"""A text, or messages; a completion of a conversation is a list with the assistant's messages."""
SHOWN = 60
"""Characters of a prompt in messages."""


@dataclass(frozen=True)
class RewardSample:
    """One completion of a prompt. prompt_ids, completion_ids: its tokens. row: the columns of the prompt's record."""

    prompt: Text
    completion: Text
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    row: Mapping[str, Any]


@dataclass(frozen=True)
class RewardTable:
    """The rewards of some samples.

    values: function -> a reward for each sample, None where the function left it out. weights: of the functions, in
    their order. logged: metrics that functions logged themselves, by name. columns: what functions logged of each
    sample (TRL's log_extra). failed: function -> number of samples that it failed on (rewards.on_failure="skip").
    """

    values: Mapping[str, list[float | None]]
    weights: Sequence[float]
    logged: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)

    def totals(self, weights: Sequence[float] | None = None) -> list[float]:
        """For each sample the weighted sum of its rewards; NaN where every function left it out.

        weights: one for each function in the order of `values`; None: those of the table.
        """
        factors = self.weights if weights is None else weights
        return [_weighted_sum(rewards, factors) for rewards in zip(*self.values.values(), strict=True)]

    @property
    def metrics(self) -> dict[str, float]:
        """TRL's metrics: rewards/<function>/mean and /std (with Bessel's correction; NaN of fewer than two samples),
        without samples that the function left out; rewards/<function>/failed, where samples were; those that functions
        logged."""
        metrics: dict[str, float] = {}
        for name, values in self.values.items():
            mean, std = mean_and_std([value for value in values if value is not None])
            metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
        return {**metrics, **{f"rewards/{name}/failed": count for name, count in self.failed.items()}, **self.logged}


class RewardError(TrainingError):
    """A reward function that failed. sample: its number in the samples given, None where no single one is at fault."""

    def __init__(self, function: str, sample: int | None, reason: str, where: str = "") -> None:
        place = where if sample is None else f"sample {sample}{where}"
        super().__init__(f'reward "{function}"{f", {place}" if place else ""}: {reason}')
        self.function, self.sample, self.reason = function, sample, reason


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """NaN for the mean of none, and for the standard deviation of fewer than two."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def text_of(text: Text) -> str:
    """The text, or the content of the last of the messages."""
    if isinstance(text, str):
        return text
    content = text[-1].get("content") if text else None
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def shown(sample: RewardSample) -> str:
    """The beginning of the prompt, for messages."""
    text = " ".join(text_of(sample.prompt).split())
    return f" (prompt {text[:SHOWN]!r}{'...' if len(text) > SHOWN else ''})"


def _weighted_sum(rewards: Sequence[float | None], weights: Sequence[float]) -> float:
    counted = [weight * value for weight, value in zip(weights, rewards, strict=True) if value is not None]
    return math.fsum(counted) if counted else math.nan
