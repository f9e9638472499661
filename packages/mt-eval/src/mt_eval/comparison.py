"""Two evaluations of the same samples: differences of their metrics, with paired bootstrap confidence intervals.

Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13 (percentile intervals); Koehn 2004,
Statistical Significance Tests for Machine Translation Evaluation, for resampling the samples of both in pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_eval.evaluation import samples_path
from mt_eval.tasks import Recorded, Sample, read_journal

LOG_LIKELIHOOD, PERPLEXITY = "log_likelihood", "perplexity"
DRAWS_AT_ONCE = 1 << 22
"""Numbers of samples that are drawn at a time; 8 bytes each."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Bootstrap:
    """resamples: sets of samples that are drawn, with replacement, of as many samples as there are. confidence: of the
    interval between equal tails."""

    resamples: int = 10_000
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.resamples < 1:
            raise ConfigError(f"--resamples {self.resamples} must be at least 1")
        if not 0 < self.confidence < 1:
            raise ConfigError(f"--confidence {self.confidence} must be between 0 and 1")


@dataclass(frozen=True)
class Difference:
    """Difference of one metric.

    first, second: means over the samples, weighted. difference: second - first; of perplexity, which
    is exp(-mean log-likelihood), second / first. low, high: the interval of the difference. samples: those with the
    metric in both evaluations; not_scored: the others."""

    first: float
    second: float
    difference: float
    low: float
    high: float
    samples: int
    not_scored: int = 0


def compare(first: Path, second: Path, bootstrap: Bootstrap) -> dict[str, dict[str, Difference]]:
    """Task -> metric -> difference, of two result files with samples beside them.

    Raises DataError for files without samples, and where the two evaluations have other tasks, data or samples.
    """
    ours, theirs = (_recorded(path) for path in (first, second))
    _check_tasks(first, ours, second, theirs)
    differences = {}
    for task, samples in ours.samples.items():
        _check_samples(task, first, samples, second, theirs.samples[task])
        differences[task] = dict(_differences(samples, theirs.samples[task], bootstrap))
    return differences


def paired_bootstrap(first: Array, second: Array, weights: Array, bootstrap: Bootstrap) -> tuple[float, float]:
    """The interval of the weighted mean of second - first; all [N]."""
    count = len(weights)
    generator = np.random.default_rng(bootstrap.seed)
    # The difference of each sample is taken before drawing: pairs stay together, which removes the variance that both
    # share.
    weighted = weights * (second - first)
    means = []
    # In portions: all draws at once would be resamples x samples numbers of 8 bytes.
    for rows in _portions(bootstrap.resamples, max(1, DRAWS_AT_ONCE // count)):
        # [rows, count], indices of samples
        drawn = generator.integers(0, count, (rows, count))
        # The weights are drawn with the samples: the denominator varies, as the number of tokens would.
        means.append(weighted[drawn].sum(axis=1) / weights[drawn].sum(axis=1))
    tail = (1 - bootstrap.confidence) / 2
    # The percentile interval: quantiles of the drawn means, without an assumption on their distribution.
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def _portions(total: int, most: int) -> Iterator[int]:
    for start in range(0, total, most):
        yield min(most, total - start)


def _differences(
    first: Sequence[Sample], second: Sequence[Sample], bootstrap: Bootstrap
) -> Iterator[tuple[str, Difference]]:
    for metric in dict.fromkeys(name for sample in first for name in sample.values):
        # Only samples that have the metric in both: a sample that failed in one of them is in neither mean.
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if metric in a.values and metric in b.values]
        if not pairs:
            continue
        ours, theirs = (np.array([pair[side].values[metric] for pair in pairs]) for side in (0, 1))
        # Equal in both, as `_check_samples` has required.
        weights = np.array([sample.weight for sample, _ in pairs])
        difference = _difference(ours, theirs, weights, bootstrap, len(first) - len(pairs))
        yield (PERPLEXITY, _of_perplexity(difference)) if metric == LOG_LIKELIHOOD else (metric, difference)


def _difference(first: Array, second: Array, weights: Array, bootstrap: Bootstrap, not_scored: int) -> Difference:
    low, high = paired_bootstrap(first, second, weights, bootstrap)
    means = float(np.average(first, weights=weights)), float(np.average(second, weights=weights))
    return Difference(*means, means[1] - means[0], low, high, len(weights), not_scored)


def _of_perplexity(difference: Difference) -> Difference:
    """From log-likelihoods. exp(-x) falls, so that the interval's ends change places."""
    # exp of a difference of log-likelihoods is a ratio of perplexities.
    first, second, ratio, high, low = np.exp(
        [-difference.first, -difference.second, -difference.difference, -difference.low, -difference.high]
    ).tolist()
    return Difference(first, second, ratio, low, high, difference.samples, difference.not_scored)


def _recorded(path: Path) -> Recorded:
    recorded = read_journal(samples_path(path))
    if not recorded.samples:
        raise DataError(f"{samples_path(path)} has no samples to compare")
    return recorded


def _check_tasks(first: Path, ours: Recorded, second: Path, theirs: Recorded) -> None:
    for path, tasks, others in ((first, ours, theirs), (second, theirs, ours)):
        only = sorted(tasks.samples.keys() - others.samples.keys())
        if only:
            raise DataError(f"{path} alone has task {only[0]}; compared are two evaluations of the same tasks")
    for task in ours.samples:
        # Results without a data_hash compare as equal.
        hashes = {_settings(recorded, task).get("data_hash") for recorded in (ours, theirs)}
        if len(hashes) > 1:
            raise DataError(f"task {task}: {first} and {second} were measured on different data (data_hash)")


def _settings(recorded: Recorded, task: str) -> Mapping[str, Any]:
    return recorded.described.get("tasks", {}).get(task, {})


def _check_samples(task: str, first: Path, ours: Sequence[Sample], second: Path, theirs: Sequence[Sample]) -> None:
    if len(ours) != len(theirs):
        raise DataError(
            f"task {task}: {first} has {len(ours)} samples, {second} {len(theirs)}; run the same command to its end, "
            "with the same --limit and windows"
        )
    for sample, other in zip(ours, theirs, strict=True):
        if sample.name != other.name:
            raise DataError(f"task {task}: where {first} has {sample.name!r}, {second} has {other.name!r}")
        # A failed sample has no weight of its own.
        is_weighed = sample.error is None and other.error is None
        if is_weighed and sample.weight != other.weight:
            raise DataError(
                f"task {task}, {sample.name}: weight {sample.weight:g} in {first}, {other.weight:g} in {second}; with "
                "another tokenizer or window the samples are not the same"
            )
