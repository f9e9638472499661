"""What an evaluation consists of: tasks, each of samples with values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mt_infer.text import TextGenerator


@dataclass(frozen=True)
class Sample:
    """What was measured on one sample of a task.

    name: unique within the task. values: by metric; a mean over samples is weighted by `weight`. truncated: the model
    was given less text than the sample has. error: why the sample could not be scored; then it has no values. details:
    whatever else is worth keeping, such as the generated text; JSON values.
    """

    name: str
    values: Mapping[str, float] = field(default_factory=dict)
    weight: float = 1.0
    truncated: bool = False
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without what is as by default."""
        given: dict[str, Any] = {"name": self.name, "values": dict(self.values), "weight": self.weight}
        optional = {"truncated": self.truncated, "error": self.error, "details": dict(self.details)}
        return given | {key: value for key, value in optional.items() if value}


class Task(Protocol):
    """A measurement over a fixed sequence of samples."""

    @property
    def name(self) -> str:
        """By which results name it."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """JSON values that decide what is measured, the hash of the data among them."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def samples(self, generator: TextGenerator, skip: int) -> Iterator[Sample]:
        """Measures the samples in their order, without the first `skip` of them."""
        ...

    def metrics(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """Of all samples of the task."""
        ...


def weighted_mean(samples: Iterable[Sample], metric: str) -> float:
    """Over samples that have the metric; nan if none has."""
    having = [sample for sample in samples if metric in sample.values]
    weight = sum(sample.weight for sample in having)
    return sum(sample.weight * sample.values[metric] for sample in having) / weight if weight else float("nan")
