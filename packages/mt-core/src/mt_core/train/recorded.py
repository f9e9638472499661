"""Values that callbacks record (`run.record`), reduced over the steps since the last line of the log and over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from mt_core.errors import TrainingError
from mt_core.parallel.context import Axis

Reduce = Literal["mean", "sum", "max", "min"]
"""How the values of a name become one; mean counts each recorded value once, on whichever rank."""
REDUCTIONS: tuple[Reduce, ...] = ("mean", "sum", "max", "min")


@dataclass(frozen=True)
class Recorded:
    """The values of a name so far, in the fewest numbers that each reduction needs."""

    reduce: Reduce
    total: float
    count: int
    largest: float
    smallest: float

    def __add__(self, other: Recorded) -> Recorded:
        """Raises TrainingError for values that are reduced in another way."""
        if self.reduce != other.reduce:
            raise TrainingError(f"recorded with reduce={self.reduce!r} and with {other.reduce!r}; use one for a name")
        return Recorded(
            self.reduce,
            self.total + other.total,
            self.count + other.count,
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
        )

    @property
    def value(self) -> float:
        values = {"mean": self.total / self.count, "sum": self.total, "max": self.largest, "min": self.smallest}
        return values[self.reduce]


class RecordedMetrics:
    """Collects until `take`. gathers: whether any rank beside the first records, the same on all ranks."""

    def __init__(self, *, gathers: bool = False) -> None:
        self.gathers = gathers
        self._values: dict[str, Recorded] = {}

    def add(self, name: str, value: float, reduce: Reduce) -> None:
        """Raises TrainingError for an unknown reduction, or another one than the name had before."""
        if reduce not in REDUCTIONS:
            raise TrainingError(f"record({name!r}, reduce={reduce!r}): it can be {', '.join(REDUCTIONS)}")
        _add(self._values, name, Recorded(reduce, value, 1, value, value))

    def take(self, world: Axis) -> dict[str, float]:
        """Name -> value, of all ranks; nothing is kept. Collective over the world where `gathers` is set."""
        local, self._values = self._values, {}
        if not self.gathers or world.size == 1:
            return {name: recorded.value for name, recorded in local.items()}
        everyone: list[Mapping[str, Recorded] | None] = [None] * world.size
        dist.all_gather_object(everyone, local, group=world.group)
        return {name: recorded.value for name, recorded in _together(values or {} for values in everyone).items()}


def _together(of_ranks: Iterable[Mapping[str, Recorded]]) -> dict[str, Recorded]:
    total: dict[str, Recorded] = {}
    for values in of_ranks:
        for name, recorded in values.items():
            _add(total, name, recorded)
    return total


def _add(values: dict[str, Recorded], name: str, recorded: Recorded) -> None:
    try:
        values[name] = values[name] + recorded if name in values else recorded
    except TrainingError as error:
        raise TrainingError(f"record({name!r}): {error}") from None
