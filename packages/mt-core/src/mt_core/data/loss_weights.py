"""Weights of positions in the loss, and what the loss of a step is divided by (train.loss_normalization).

The loss of a step is sum(weight * loss) / divisor over all positions of its global batch. Weights are the field
`loss_mask`; 1 everywhere but at positions that are left out gives the plain mean. Both are computed here, on whole
sequences of the host, before sequences are cut over context-parallel ranks:

    normalization   weight of position i                     divisor
    weights         w_i                                      sum of w over the global batch
    tokens          w_i                                      positions with w > 0
    sequences       w_i / sum of w over its sequence         sequences with a position with w > 0
    constant        w_i                                      train.loss_divisor

A sequence is a row of the batch, or a segment where the data set gives `segment_ids`.

Throughput counts positions with w > 0 as tokens. Where one position stands for a whole text, such as an answer that is
compared with another, the data set gives `token_mask` beside it: 1 at positions whose tokens are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mt_core.config.schema import TrainConfig
from mt_core.errors import DataError
from mt_core.interfaces import TOKEN_MASK

WEIGHTS, SEGMENTS = "loss_mask", "segment_ids"
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LossCounts:
    """Counts of one data-parallel rank's samples. divisor: its part of what the loss is divided by. tokens: positions
    with a weight above 0, or those of `token_mask` in rows with such a position."""

    divisor: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True)
class LossNormalization:
    """ranks: data-parallel ranks, over which divisors are summed. Raises DataError for weights that are negative or not
    finite."""

    kind: str = "weights"
    constant: float | None = None
    ranks: int = 1

    @classmethod
    def configured(cls, train: TrainConfig, ranks: int) -> LossNormalization:
        return cls(train.loss_normalization, train.loss_divisor, ranks)

    def weigh(self, arrays: Arrays) -> Arrays:
        """A micro-batch with the weights that losses are multiplied by; 1 a row where the data set gives none."""
        rows = len(next(iter(arrays.values())))
        weights = arrays.get(WEIGHTS)
        if weights is None:
            return {**arrays, WEIGHTS: np.ones(rows, dtype=np.float32)}
        _require_weights(weights)
        if self.kind != "sequences":
            return arrays
        return {**arrays, WEIGHTS: _weights_of_means(weights, _sequence_numbers(arrays, weights))}

    def counts(self, micro_batches: Iterable[Arrays]) -> LossCounts:
        """Counts of micro-batches of whole sequences on the host, before `weigh`."""
        counts = [self._counts(arrays) for arrays in micro_batches]
        tokens = sum(count.tokens for count in counts)
        # Every rank gives an equal part of the constant, also one without samples.
        divisor = sum(count.divisor for count in counts) if self.constant is None else self.constant / self.ranks
        return LossCounts(divisor, tokens)

    def _counts(self, arrays: Arrays) -> LossCounts:
        weights = arrays.get(WEIGHTS)
        if weights is None:
            rows = float(len(next(iter(arrays.values()))))
            return LossCounts(rows, rows)
        tokens, positions = _tokens(arrays, weights), float(np.count_nonzero(weights))
        if self.kind == "sequences":
            return LossCounts(float(len(np.unique(_sequence_numbers(arrays, weights)[weights > 0]))), tokens)
        return LossCounts(float(weights.sum(dtype=np.float64)) if self.kind == "weights" else positions, tokens)


def _tokens(arrays: Arrays, weights: np.ndarray) -> float:
    mask = arrays.get(TOKEN_MASK, weights)
    # Rows without weight fill up the last batch of an evaluation.
    return float(np.count_nonzero(mask[weights.any(tuple(range(1, weights.ndim)))]))


def _require_weights(weights: np.ndarray) -> None:
    if not np.isfinite(weights).all() or (weights < 0).any():
        wrong = weights[~(np.isfinite(weights) & (weights >= 0))].ravel()[0]
        raise DataError(
            f"{WEIGHTS} has {wrong}; it is the weight of a position's loss: 1, 0 to leave the position out, or another "
            "finite number above 0"
        )


def _sequence_numbers(arrays: Arrays, weights: np.ndarray) -> np.ndarray:
    """The number of each position's sequence in the micro-batch, in the shape of the weights."""
    rows = np.arange(len(weights)).reshape(-1, *(1,) * (weights.ndim - 1))
    segments = arrays.get(SEGMENTS)
    if segments is None or segments.shape != weights.shape:
        return np.broadcast_to(rows, weights.shape)
    pairs = np.stack([np.broadcast_to(rows, weights.shape), segments], -1).reshape(-1, 2)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(weights.shape)


def _weights_of_means(weights: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Weights whose sum over each sequence is 1, or 0 where it has none."""
    sums = np.bincount(sequences.ravel(), weights.ravel().astype(np.float64))
    return (weights / np.where(sums > 0, sums, 1.0)[sequences]).astype(np.float32)
