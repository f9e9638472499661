"""The loss of a bigram model, as a yardstick: what counting pairs of tokens gives on the same text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

LARGEST_VOCABULARY = 1024
"""Pairs are counted in a dense table; larger vocabularies get no yardstick."""


def bigram_probabilities(tokens: NDArray[np.integer], vocab_size: int) -> NDArray[np.float64]:
    """[vocab, vocab] P(next | current) from counts of neighbours, one added to each count (Laplace)."""
    # A pair as one number, so that bincount makes the table [vocab * vocab] in one pass.
    pairs = tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]
    counts = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size) + 1.0
    return counts / counts.sum(axis=1, keepdims=True)


def bigram_loss(tokens: NDArray[np.integer], windows: Iterable[NDArray[np.integer]], vocab_size: int) -> float:
    """Mean -log P over the transitions inside `windows`, of a model counted on `tokens`, in nats."""
    log_probabilities = np.log(bigram_probabilities(tokens, vocab_size))
    losses = [-log_probabilities[window[:-1], window[1:]] for window in windows]
    return float(np.concatenate(losses).mean())
