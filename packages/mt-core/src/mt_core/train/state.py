"""The counters of a run, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Counters that go into a checkpoint."""

    iteration: int = 0
    """Completed optimizer steps, including skipped ones."""
    consumed_samples: int = 0
    """Samples consumed by all ranks."""
    schedule_samples: int = 0
    """Samples of the steps that changed the weights. Learning rates and weight decay are those after so many samples,
    as in Megatron (`num_steps` of its scheduler): a skipped step leaves them where they are."""
    skipped_iterations: int = 0
    """Steps without an update because a gradient overflowed in fp16."""

    def count(self, num_samples: int, *, updated: bool) -> None:
        """Advance by a step on so many samples of all ranks. updated: whether it changed the weights."""
        self.iteration += 1
        self.consumed_samples += num_samples
        if updated:
            self.schedule_samples += num_samples

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Take the counters of a checkpoint. One without `schedule_samples` followed the samples consumed."""
        values = {"schedule_samples": metadata["consumed_samples"], **metadata}
        for name in asdict(self):
            setattr(self, name, int(values[name]))


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
