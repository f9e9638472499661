"""Metrics of classification and regression, against cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mt_models.heads import metrics


def outputs(*predicted: int, classes: int = 2) -> np.ndarray:
    """Logits whose largest is that of the predicted class."""
    return np.eye(classes, dtype=np.float32)[list(predicted)] - 0.25


def test_two_classes() -> None:
    # Of class 1: 3 right, 1 predicted in vain, 2 missed; of class 0: 4 right.
    predicted, labels = outputs(1, 1, 1, 1, 0, 0, 0, 0, 0, 0), np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
    assert metrics.accuracy(predicted, labels) == pytest.approx(0.7)
    precision, recall = 3 / 4, 3 / 5
    assert metrics.f1(predicted, labels) == pytest.approx(2 * precision * recall / (precision + recall))
    expected = (3 * 4 - 1 * 2) / math.sqrt((3 + 1) * (3 + 2) * (4 + 1) * (4 + 2))
    assert metrics.matthews(predicted, labels) == pytest.approx(expected)


def test_three_classes() -> None:
    """Gorodkin's correlation: covariances of the indicators of each class, summed."""
    predicted, labels = [0, 1, 2, 2, 1, 0], [0, 1, 2, 1, 1, 2]
    x, y = (np.eye(3)[values] - np.eye(3)[values].mean(0) for values in (predicted, labels))
    expected = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    found = metrics.matthews(outputs(*predicted, classes=3), np.array(labels))
    assert found == pytest.approx(expected)


def test_correlations() -> None:
    predicted = np.array([[1.0], [2.0], [4.0], [4.0]], np.float32)
    labels = np.array([0.0, 1.0, 1.0, 5.0], np.float32)
    # Deviations from the means 2.75 and 1.75.
    dx, dy = [-1.75, -0.75, 1.25, 1.25], [-1.75, -0.75, -0.75, 3.25]
    expected = sum(a * b for a, b in zip(dx, dy, strict=True)) / math.sqrt(
        sum(a * a for a in dx) * sum(b * b for b in dy)
    )
    assert metrics.pearson(predicted, labels) == pytest.approx(expected)
    # Ranks 1 2 3.5 3.5 and 1 2.5 2.5 4: deviations from 2.5.
    assert metrics.spearman(predicted, labels) == pytest.approx(3.75 / math.sqrt(4.5 * 4.5))


def test_undefined_values_are_zero() -> None:
    none = np.zeros((0, 2), np.float32)
    assert metrics.accuracy(none, np.zeros(0, np.int64)) == 0
    assert metrics.f1(outputs(0, 0), np.array([0, 0])) == 0
    assert metrics.matthews(outputs(1, 1), np.array([0, 1])) == 0
    assert metrics.pearson(np.ones((2, 1), np.float32), np.array([0, 1], np.float32)) == 0
    assert metrics.spearman(none[:, :1], np.zeros(0, np.float32)) == 0
