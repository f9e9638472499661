"""Metrics of classification and regression: outputs [N, C] in fp32 and labels [N] -> a number, the higher the better.

Without samples, and where a definition divides by 0, a metric is 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Labels = NDArray[np.int64]


def accuracy(outputs: Array, labels: Labels) -> float:
    """Share of the samples whose largest output is that of the label."""
    return float((outputs.argmax(-1) == labels).mean()) if len(labels) else 0.0


def f1(outputs: Array, labels: Labels) -> float:
    """Harmonic mean of precision and recall of class 1, of two classes."""
    predicted, actual = outputs.argmax(-1) == 1, labels == 1
    return _quotient(2 * float((predicted & actual).sum()), float(predicted.sum() + actual.sum()))


def matthews(outputs: Array, labels: Labels) -> float:
    """Correlation of predicted and true classes, of any number (Gorodkin, 2004); for two that of Matthews (1975)."""
    classes = outputs.shape[-1]
    # Confusion matrix [actual, predicted] from numbers actual x classes + predicted
    table = np.bincount(labels * classes + outputs.argmax(-1), minlength=classes**2).reshape(classes, classes)
    actual, predicted, total = table.sum(1, dtype=float), table.sum(0, dtype=float), float(table.sum())
    # Gorodkin's R_K: (c s - sum_k p_k t_k) / sqrt((s^2 - sum p_k^2) (s^2 - sum t_k^2)), with c samples of s right, p_k
    # predicted and t_k actual samples of class k. In fp64: products of counts exceed 2^53 only far beyond any data set.
    covariance = float(np.trace(table)) * total - float(actual @ predicted)
    spread = (total**2 - float(predicted @ predicted)) * (total**2 - float(actual @ actual))
    return _quotient(covariance, float(np.sqrt(spread)))


def pearson(outputs: Array, labels: Array) -> float:
    """Linear correlation of predicted and true numbers."""
    return _correlation(outputs[:, 0].astype(np.float64), labels.astype(np.float64))


def spearman(outputs: Array, labels: Array) -> float:
    """Linear correlation of their ranks; equal numbers have the mean of their ranks."""
    return _correlation(_ranks(outputs[:, 0]), _ranks(labels))


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    if not len(x):
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return _quotient(float(x @ y), float(np.sqrt((x @ x) * (y @ y))))


def _ranks(values: Array) -> NDArray[np.float64]:
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    # Rank of the last of each group of equal values; the mean of a group of n is (n - 1) / 2 below it.
    last = np.cumsum(counts, dtype=np.float64)
    return (last - (counts - 1) / 2)[numbers]


def _quotient(above: float, below: float) -> float:
    return above / below if below else 0.0
