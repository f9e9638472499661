"""Where training stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TrainState:
    """Counters that go into a checkpoint."""

    iteration: int = 0
    """Optimizer steps done, skipped ones included."""
    consumed_samples: int = 0
    """Samples taken by all ranks."""
    skipped_iterations: int = 0
    """Steps without an update because a gradient overflowed in fp16."""
