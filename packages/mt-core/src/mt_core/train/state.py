"""The counters of a run, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class TrainState:
    """Counters that go into a checkpoint."""

    iteration: int = 0
    """Completed optimizer steps, including skipped ones."""
    consumed_samples: int = 0
    """Samples consumed by all ranks."""
    skipped_iterations: int = 0
    """Steps without an update because a gradient overflowed in fp16."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. losses, metrics: the last evaluation's `<set>_loss` and `<set>_<metric>`. stopped: reason of an
    early stop, else None. interrupted: the stop was a signal to any of the ranks."""

    state: TrainState
    losses: Mapping[str, float]
    reference_losses: Mapping[str, float]
    stopped: str | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    interrupted: bool = False
