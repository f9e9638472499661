"""Mixes of data sets: which sample of which data set stands at each place.

At each place stands the data set that lags most behind its share; the lowest number wins a tie. That is
Megatron's rule, computed in the same double-precision steps, so that orders are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from mt_core.errors import ConfigError, DataError
from mt_core.specs import Dataset, SplitRequest
from mt_data.datasets.blend_index import BlendIndex, build_blend_index, build_exhaustive_blend_index, normalized
from mt_data.datasets.config import BlendEntry
from mt_data.datasets.fingerprints import combined
from mt_data.datasets.index_cache import IndexCache

MAX_DATASETS = np.iinfo(np.int16).max


class BlendedDataset:
    """Sample k is sample `index.dataset_sample_index[k]` of data set `index.dataset_index[k]`."""

    def __init__(
        self, datasets: Sequence[Dataset], index: BlendIndex, names: Sequence[str], weights: Sequence[float] = ()
    ) -> None:
        self.datasets = datasets
        self.weights = list(weights)
        self.index = index
        self.names = names

    def __len__(self) -> int:
        return len(self.index.dataset_index)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        dataset, sample = self.place(index)
        return self.datasets[dataset][sample]

    def fingerprint(self) -> str:
        """The content of all data sets and their weights, which a file may name; those without one count as alike."""
        found = [getattr(dataset, "fingerprint", str)() for dataset in self.datasets]
        return combined([found, self.weights])

    def place(self, index: int) -> tuple[int, int]:
        """(data set, sample within it) of sample `index`; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend that has {len(self)} samples")
        return int(self.index.dataset_index[index]), int(self.index.dataset_sample_index[index])

    def describe(self, index: int) -> str:
        dataset, sample = self.place(index)
        return (
            f"data set {dataset} of {len(self.datasets)} ({self.names[dataset]}), sample {sample} -> "
            f"{self.datasets[dataset].describe(sample)}"
        )


class BuildOne(Protocol):
    """Builds one data set of a blend, all its samples when num_samples is None."""

    def __call__(self, entry: BlendEntry, num_samples: int | None) -> Dataset: ...


def build_blend(
    entries: Sequence[BlendEntry], request: SplitRequest, build_one: BuildOne, *, surplus: float, cache: IndexCache
) -> Dataset:
    """The data set of one entry, or the blend of several, for `request`.

    Weighted: at least the samples requested, each data set repeated as often as that takes. Exact samples:
    just these. Neither: each data set once, and no more than was requested.
    Raises DataError when a blend without weights or with exact samples has less than was requested.
    """
    if len(entries) > MAX_DATASETS:
        raise ConfigError(f"a blend holds at most {MAX_DATASETS} data sets, here are {len(entries)}")
    if len(entries) == 1 and entries[0].samples is None:
        return build_one(entries[0], request.num_samples)
    if entries[0].weight is not None:
        return _by_weight(entries, request, build_one, surplus, cache)
    return _exhaustive(entries, request, build_one, cache)


def _by_weight(
    entries: Sequence[BlendEntry], request: SplitRequest, build_one: BuildOne, surplus: float, cache: IndexCache
) -> BlendedDataset:
    if request.num_samples is None:
        raise DataError(
            f"all samples of the {request.split} split are asked for, and weights cannot say what all of a "
            "blend is; leave the weights out, which takes every sample of each data set once"
        )
    weights = normalized([float(entry.weight or 0) for entry in entries])
    needed = [math.ceil(request.num_samples * weight) for weight in weights.tolist()]
    size = sum(needed)
    index = _cached(
        cache, {"weights": weights.tolist(), "size": size}, lambda: build_blend_index(weights.tolist(), size)
    )
    # [data sets]: how often each occurs in the blend.
    used = np.bincount(index.dataset_index, minlength=len(entries)).tolist()
    datasets = []
    for entry, need, count in zip(entries, needed, used, strict=True):
        # Megatron-LM: --mid-level-dataset-surplus, 0.5 % by default. The number of samples requested decides the epochs
        # and so the order of this data set; it must be the same as Megatron's for equal samples.
        dataset = build_one(entry, math.ceil(need * (1 + surplus)))
        # Rounding can ask one more of a data set than its share.
        datasets.append(dataset if len(dataset) >= count else build_one(entry, count))
    return BlendedDataset(datasets, index, [entry.prefix for entry in entries], weights.tolist())


def _exhaustive(
    entries: Sequence[BlendEntry], request: SplitRequest, build_one: BuildOne, cache: IndexCache
) -> BlendedDataset:
    datasets = [build_one(entry, entry.samples) for entry in entries]
    # Sizes are the weights, so that all data sets run out near the end of the blend.
    sizes = [entry.samples or len(dataset) for entry, dataset in zip(entries, datasets, strict=True)]
    for entry, dataset in zip(entries, datasets, strict=True):
        if len(dataset) < (entry.samples or 0):
            raise DataError(f"{entry.prefix} gives {len(dataset)} samples, fewer than samples={entry.samples}")
    total = sum(sizes)
    asked = request.num_samples
    if asked is not None and asked > total:
        raise DataError(
            f"the {request.split} split needs {asked} samples, and its blend of {len(entries)} data sets "
            f"{'names exactly' if entries[0].samples else 'without weights has'} {total}; "
            f"{'raise the samples' if entries[0].samples else 'give weights, so that data sets repeat'}, or use "
            "fewer samples (train.train_iters, train.eval_iters, train.global_batch_size)"
        )
    # check_blend has made sure that either all entries have `samples` or none.
    size = total if asked is None or entries[0].samples else asked
    key = {"sizes": sizes, "size": size}
    index = _cached(cache, key, lambda: build_exhaustive_blend_index(sizes, size))
    return BlendedDataset(datasets, index, [entry.prefix for entry in entries])


def _cached(cache: IndexCache, key: Mapping[str, object], build: Callable[[], BlendIndex]) -> BlendIndex:
    return BlendIndex(**cache.get({"blend": key}, lambda: build().arrays()))
