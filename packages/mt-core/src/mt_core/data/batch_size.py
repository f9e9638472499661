"""The global batch size as a function of consumed samples alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mt_core.config.checks import global_batch_size
from mt_core.config.schema import Config


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Constant, or grown from `start` by `increment`, evenly over the first `ramp_samples` samples."""

    full: int
    start: int | None = None
    increment: int = 0
    ramp_samples: int = 0

    def __call__(self, consumed_samples: int) -> int:
        # Megatron's RampupBatchsizeNumMicroBatchesCalculator: the same size after the same number of samples, also
        # behind a resumption.
        if self.start is None or consumed_samples > self.ramp_samples or self.start == self.full:
            return self.full
        increments = (self.full - self.start) // self.increment
        # 16 -> 64 by 16 over 300 samples: 3 increments, one at 100, 200 and 300 samples.
        samples_per_increment = self.ramp_samples / increments
        # ramp_samples of 0: the full size from the first step on.
        if samples_per_increment == 0:
            return self.full
        return min(self.start + int(consumed_samples / samples_per_increment) * self.increment, self.full)

    def steps(self, consumed_samples: int, total_samples: int) -> Iterator[tuple[int, int]]:
        """(first sample, batch size) of each step from `consumed_samples` on; a last short batch is left out."""
        size = self(consumed_samples)
        while consumed_samples + size <= total_samples:
            yield consumed_samples, size
            consumed_samples += size
            size = self(consumed_samples)


def build_batch_size(config: Config) -> BatchSizeSchedule:
    full = global_batch_size(config)
    if config.train.rampup_batch_size is None:
        return BatchSizeSchedule(full)
    start, increment, ramp_samples = config.train.rampup_batch_size
    return BatchSizeSchedule(full, start, increment, ramp_samples)


def total_train_samples(config: Config) -> int:
    """Samples of the whole training, over all ranks."""
    if config.train.train_samples is not None:
        return config.train.train_samples
    assert config.train.train_iters is not None  # ensured by check_duration, and by with_train_iters for train_epochs
    return config.train.train_iters * global_batch_size(config)
