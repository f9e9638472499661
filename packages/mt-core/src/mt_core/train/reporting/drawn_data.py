"""How many samples a run has drawn from each data set of a blend, for its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from mt_core.train.callbacks import Run


@runtime_checkable
class Blend(Protocol):
    """A data set that is a blend of several. weights: planned parts of its samples; empty where every sample of each is
    taken once."""

    names: Sequence[str]
    weights: Sequence[float]
    datasets: Sequence[Any]

    def counts(self, first: int, stop: int) -> Sequence[int]:
        """How many of samples first ... stop - 1 are of each data set."""
        ...


class DrawnData:
    """Counts the samples that this process takes from a blend; of another data set it has nothing to say."""

    def __init__(self, run: Run) -> None:
        # Only the trainer has data; other programs use the same callbacks.
        data = getattr(run, "train_data", None)
        self.blend: Blend | None = data if isinstance(data, Blend) else None
        self.length: int = run.config.data.seq_length
        self.first = self.counted = run.state.consumed_samples
        self.samples = [0] * len(self.blend.names) if self.blend is not None else []

    def fields(self, consumed: int) -> dict[str, Any] | None:
        """Fields of an event of kind `data`. consumed: samples of the whole run until now."""
        if self.blend is None or consumed <= self.counted:
            return None
        # Only what came since the last time: a blend of 10^9 samples is not counted again at each checkpoint.
        more = self.blend.counts(self.counted, consumed)
        self.samples = [before + new for before, new in zip(self.samples, more, strict=True)]
        self.counted = consumed
        return {"first_sample": self.first, "datasets": self._datasets(self.blend)}

    def _datasets(self, blend: Blend) -> list[Mapping[str, Any]]:
        sizes = [float(len(dataset)) for dataset in blend.datasets]
        weights = blend.weights or [size / sum(sizes) for size in sizes]
        return [
            {"name": name, "weight": float(weight), "samples": count, "tokens": count * self.length}
            for name, weight, count in zip(blend.names, weights, self.samples, strict=True)
        ]
