"""Length of training in whole epochs (train.train_epochs), and the global batch size by consumed samples.

As in Megatron's finetuning, each epoch is shuffled by seed + epoch, and its incomplete last batch is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.config.checks import global_batch_size
from mt_core.config.schema import Config
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Dataset


class EpochDataset:
    """Sample k is sample `order(epoch)[place]` of a data set, with k = epoch * epoch_samples + place.

    epoch_samples: samples of an epoch, at most those of the data set.
    """

    def __init__(self, dataset: Dataset, epochs: int, epoch_samples: int, seed: int) -> None:
        self.dataset, self.epochs, self.epoch_samples, self.seed = dataset, epochs, epoch_samples, seed
        # Two: readers that prefetch cross from one epoch into the next. On the object, so that it is freed with it.
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        return self.epochs * self.epoch_samples

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self.dataset[self._place(index)]

    def describe(self, index: int) -> str:
        return self.dataset.describe(self._place(index))

    def fingerprint(self) -> str:
        """That of the data set; empty when it has none."""
        return str(getattr(self.dataset, "fingerprint", str)())

    def _place(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.epochs} epochs that have {len(self)} samples")
        epoch, place = divmod(index, self.epoch_samples)
        # place < epoch_samples <= len(dataset): the end of the permutation, the incomplete batch, is left out, other
        # samples in each epoch.
        return int(self._order(epoch)[place])

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        # By seed and epoch alone, so that a resumed run finds the same order.
        return np.random.default_rng(self.seed + epoch).permutation(len(self.dataset))


class EpochsOfBlend(EpochDataset):
    """Epochs of a blend of data sets, which say, as it does, how many samples are drawn from each."""

    def __init__(self, blend: Any, epochs: int, epoch_samples: int, seed: int) -> None:
        super().__init__(blend, epochs, epoch_samples, seed)
        self.blend = blend
        self.names, self.weights, self.datasets = blend.names, blend.weights, blend.datasets

    def counts(self, first: int, stop: int) -> list[int]:
        """How many of samples first ... stop - 1 are of each data set."""
        drawn = Counter(self.blend.place(self._place(index))[0] for index in range(first, stop))
        return [drawn[number] for number in range(len(self.datasets))]


def iterations_of_epoch(samples: int, config: Config) -> int:
    """Steps of an epoch of so many samples. Raises DataError for less than a global batch."""
    size = global_batch_size(config)
    if samples < size:
        raise DataError(
            f"the training set has {samples} samples, fewer than a global batch of {size}; lower "
            "train.global_batch_size or train.micro_batch_size, or give more data"
        )
    return samples // size


def with_train_iters(config: Config, samples: int) -> Config:
    """train.train_iters filled in from train.train_epochs and the samples of an epoch, or checked against them.

    Raises ConfigError when train_iters is given and is not that number.
    """
    train = config.train
    assert train.train_epochs is not None
    steps = iterations_of_epoch(samples, config)
    if train.train_iters not in (None, train.train_epochs * steps):
        raise ConfigError(
            f"train.train_iters={train.train_iters}, and train.train_epochs={train.train_epochs} epochs of {steps} "
            f"steps are {train.train_epochs * steps}; remove one of them (null)"
        )
    resolved = train.model_copy(update={"train_iters": train.train_epochs * steps})
    return config.model_copy(update={"train": resolved})


def iterations_per_epoch(config: Config) -> int | None:
    """Iterations of an epoch, with train.train_iters resolved; None without train.train_epochs."""
    train = config.train
    if train.train_epochs is None or train.train_iters is None:
        return None
    return train.train_iters // train.train_epochs


# -- batch size --------------------------------------------------------------------------------------


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
