"""Mixes of data sets: which sample of which data set stands at each place.

At each place stands the data set that lags most behind its share; the lowest number wins a tie. That is
Megatron's rule, computed in the same double-precision steps, so that orders are equal.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Dataset, SplitRequest
from mt_data.datasets.cache import IndexCache, combined
from mt_data.datasets.config import BlendEntry

log = logging.getLogger(__name__)

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
        fingerprints = [getattr(dataset, "fingerprint", str)() for dataset in self.datasets]
        return combined([fingerprints, self.weights])

    def place(self, index: int) -> tuple[int, int]:
        """(data set, sample within it) of sample `index`; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend that has {len(self)} samples")
        return int(self.index.dataset_index[index]), int(self.index.dataset_sample_index[index])

    def counts(self, first: int, stop: int) -> list[int]:
        """How many of samples first ... stop - 1 are of each data set."""
        picks = np.bincount(self.index.dataset_index[first:stop], minlength=len(self.datasets))
        return [int(count) for count in picks]

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
    just these. Neither: each data set once, and no more than was requested; where that is less than was requested,
    all are repeated alike, which a warning says.
    Raises DataError when a blend with exact samples has less than was requested.
    """
    if len(entries) > MAX_DATASETS:
        raise ConfigError(f"a blend holds at most {MAX_DATASETS} data sets, here are {len(entries)}")
    if len(entries) == 1 and entries[0].samples is None:
        return build_one(entries[0], request.num_samples)
    if entries[0].weight is not None:
        return _by_weight(entries, request, build_one, surplus, cache)
    return _exhaustive(entries, request, build_one, surplus, cache)


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
    entries: Sequence[BlendEntry], request: SplitRequest, build_one: BuildOne, surplus: float, cache: IndexCache
) -> BlendedDataset:
    datasets = [build_one(entry, entry.samples) for entry in entries]
    # Sizes are the weights, so that all data sets run out near the end of the blend.
    sizes = [entry.samples or len(dataset) for entry, dataset in zip(entries, datasets, strict=True)]
    for entry, dataset in zip(entries, datasets, strict=True):
        if len(dataset) < (entry.samples or 0):
            raise DataError(f"{entry.prefix} gives {len(dataset)} samples, fewer than samples={entry.samples}")
    # check_blend has made sure that either all entries have `samples` or none.
    exact, total, asked = entries[0].samples is not None, sum(sizes), request.num_samples
    if asked is not None and asked > total:
        if not exact:
            return _repeated(entries, sizes, request, build_one, surplus, cache)
        raise DataError(
            f"the {request.split} split needs {asked} samples, and its blend of {len(entries)} data sets names exactly "
            f"{total}; raise the samples, or use fewer (train.train_iters, train.eval_iters, train.global_batch_size)"
        )
    size = total if asked is None or exact else asked
    key = {"sizes": sizes, "size": size}
    index = _cached(cache, key, lambda: build_exhaustive_blend_index(sizes, size))
    return BlendedDataset(datasets, index, [entry.prefix for entry in entries])


def _repeated(
    entries: Sequence[BlendEntry],
    sizes: Sequence[int],
    request: SplitRequest,
    build_one: BuildOne,
    surplus: float,
    cache: IndexCache,
) -> BlendedDataset:
    """The blend with the sizes [data sets] of one epoch as weights, so that each sample is seen about as often."""
    asked = request.num_samples or 0
    log.warning(
        "the %s split takes %d samples, and its blend of %d data sets without weights has %d: each is repeated %.1f "
        "times (weights in the list give other shares)",
        request.split,
        asked,
        len(entries),
        sum(sizes),
        asked / sum(sizes),
    )
    weighted = [entry.model_copy(update={"weight": float(size)}) for entry, size in zip(entries, sizes, strict=True)]
    return _by_weight(weighted, request, build_one, surplus, cache)


def _cached(cache: IndexCache, key: Mapping[str, object], build: Callable[[], BlendIndex]) -> BlendIndex:
    return BlendIndex(**cache.get({"blend": key}, lambda: build().arrays()))


# -- order of samples, equal to Megatron's -----------------------------------------------------------
#
# Place i goes to the data set with the largest lag, weight * max(i, 1) - count, where count is how often it
# stood before; the lowest number wins a tie. Places follow one from another, which in a loop costs a
# microsecond each. Here many chains that start at different places walk side by side. A chain's start is
# guessed a while before its first place, since lags soon forget how they began. That guesses were right is
# checked afterwards (each chain must end where the next began), and chains that began wrong walk again, so
# that the result is exactly that of the loop.

_CHAINS = 4096
"""Chains side by side; enough to make NumPy's cost a call small, few enough to stay in cache."""
_WARM_UP = 2.0
"""Places before a chain's start, in turns of the rarest data set."""


@dataclass(frozen=True)
class BlendIndex:
    """dataset_index int16 [places]: the data set; dataset_sample_index int64 [places]: which of its samples."""

    dataset_index: NDArray[np.int16]
    dataset_sample_index: NDArray[np.int64]

    def arrays(self) -> dict[str, NDArray[np.integer]]:
        return {"dataset_index": self.dataset_index, "dataset_sample_index": self.dataset_sample_index}


def build_blend_index(weights: Sequence[float], size: int) -> BlendIndex:
    """`size` places by weights (any positive numbers; only their ratios count)."""
    return _numbered(_walk(normalized(weights), None, size), len(weights))


def build_exhaustive_blend_index(sizes: Sequence[int], size: int | None = None) -> BlendIndex:
    """Every sample of data sets with `sizes` once, in proportion; a data set that is used up drops out.

    size: only the first so many places.
    """
    total = sum(sizes)
    places = total if size is None else min(size, total)
    return _numbered(_walk(normalized(sizes), np.asarray(sizes, np.int64), places), len(sizes))


def normalized(weights: Sequence[float]) -> NDArray[np.float64]:
    """Weights that add up to 1."""
    array = np.asarray(weights, np.float64)
    return array / array.sum()


def _numbered(picks: NDArray[np.int16], datasets: int) -> BlendIndex:
    numbers = np.empty(len(picks), np.int64)
    for dataset in range(datasets):
        places = np.flatnonzero(picks == dataset)
        numbers[places] = np.arange(len(places))
    return BlendIndex(picks, numbers)


def _walk(weights: NDArray[np.float64], limits: NDArray[np.int64] | None, size: int) -> NDArray[np.int16]:
    """The data set at each of `size` places; limits [datasets] are the most that each may stand."""
    # The rarest data set stands every 1 / weight places, so this is two of its turns.
    warm_up = int(np.ceil(_WARM_UP / weights.min()))
    chains = int(np.clip(size // (4 * warm_up), 1, _CHAINS))
    # Each chain also walks warm_up places that are thrown away, at most a quarter of its own; with few chains side by
    # side the NumPy calls of a step cost more than the steps of the loop that they save.
    if chains < 8:
        return _walk_alone(weights, limits, size)
    # [chains + 1]: chain c fills the places bounds[c] to bounds[c + 1] - 1.
    bounds = np.linspace(0, size, chains + 1).astype(np.int64)
    early = np.maximum(bounds[:-1] - warm_up, 0)
    # int64 [datasets, chains]: how often each data set stood before the chain's first place. Chain 0 starts at 0 with
    # exact counts, so by induction a chain is right once its start equals the end of a right chain before it.
    starts = _advance(_guess(weights, limits, early), early, bounds[:-1], weights, limits)[0]
    picks = np.empty(size, np.int16)
    ends = np.empty_like(starts)
    wrong = np.arange(chains)
    while len(wrong):
        # chosen [longest walk, wrong chains]; linspace makes lengths that differ by one, so the rest of a column is cut
        # off.
        ends[:, wrong], chosen = _advance(
            starts[:, wrong], bounds[wrong], bounds[wrong + 1], weights, limits, keep=True
        )
        for chain, taken in zip(wrong.tolist(), chosen.T, strict=True):
            picks[bounds[chain] : bounds[chain + 1]] = taken[: bounds[chain + 1] - bounds[chain]]
        # Each round makes at least the first wrong chain right, so the loop ends.
        wrong = 1 + np.flatnonzero((starts[:, 1:] != ends[:, :-1]).any(axis=0))
        starts[:, wrong] = ends[:, wrong - 1]
    return picks


def _guess(
    weights: NDArray[np.float64], limits: NDArray[np.int64] | None, places: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Counts [datasets, chains] that may hold before each of `places`: shares, rounded to the right sum."""
    shares = weights[:, None] * places
    counts = np.floor(shares).astype(np.int64)
    # The largest remainders get what rounding down left over.
    # argsort of argsort is the rank: 0 for the data set with the largest remainder in each chain.
    rank = np.argsort(np.argsort(counts - shares, axis=0, kind="stable"), axis=0)
    counts += rank < places - counts.sum(axis=0)
    return counts if limits is None else np.minimum(counts, limits[:, None])


def _advance(
    counts: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    weights: NDArray[np.float64],
    limits: NDArray[np.int64] | None,
    keep: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    """Walk each chain from place `begin` to `end` [chains]; counts [datasets, chains] before and after.

    Returns the counts and, with keep, the picks [longest walk, chains].
    """
    counts = counts.copy()
    lengths = end - begin
    longest = int(lengths.max(initial=0))
    picks = np.empty((longest if keep else 0, counts.shape[1]), np.int16)
    chains = np.arange(counts.shape[1])
    lag = np.empty(counts.shape, np.float64)
    for step in range(longest):
        # float64 [datasets, chains], in Megatron's order of operations (weight * place, then - count): another order
        # rounds differently and breaks ties in another way.
        np.multiply(weights[:, None], np.maximum(begin + step, 1).astype(np.float64), out=lag)
        lag -= counts
        if limits is not None:
            lag[counts >= limits[:, None]] = -np.inf
        # argmax takes the first of equals, as the strict comparison in Megatron's build_blending_indices does.
        pick = lag.argmax(axis=0)
        # Chains that have reached their end pick on, but their counts stay.
        going = step < lengths
        counts[pick[going], chains[going]] += 1
        if keep:
            picks[step] = pick
    return counts, picks


def _walk_alone(weights: NDArray[np.float64], limits: NDArray[np.int64] | None, size: int) -> NDArray[np.int16]:
    """The same in a plain loop, for blends too short or too uneven for chains."""
    shares = weights.tolist()
    # size + 1 is never reached: without limits no data set drops out.
    left = [size + 1] * len(shares) if limits is None else limits.tolist()
    counts = [0] * len(shares)
    picks = np.empty(size, np.int16)
    unspent = [d for d, samples in enumerate(left) if samples]
    for place in range(size):
        factor = float(max(place, 1))
        # max() keeps the first of equals.
        best = max(unspent, key=lambda d: shares[d] * factor - counts[d])
        picks[place] = best
        counts[best] += 1
        if counts[best] == left[best]:
            unspent.remove(best)
    return picks
