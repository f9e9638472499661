"""The yardstick of the built-in corpus, against counts made by hand and against the best possible bigram model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mt_data.datasets.builtin import bigram_loss, bigram_probabilities


def test_counts_with_one_added() -> None:
    """a b a b a: after a comes b twice, after b comes a twice; a third token never."""
    table = bigram_probabilities(np.array([0, 1, 0, 1, 0], np.uint16), 3)
    assert table[0].tolist() == pytest.approx([1 / 5, 3 / 5, 1 / 5])
    assert table[1].tolist() == pytest.approx([3 / 5, 1 / 5, 1 / 5])
    assert table[2].tolist() == pytest.approx([1 / 3] * 3)


def test_the_loss_is_the_mean_over_transitions() -> None:
    loss = bigram_loss(np.array([0, 1, 0, 1, 0]), [np.array([0, 1]), np.array([1, 2, 2])], 3)
    assert loss == pytest.approx(-(math.log(3 / 5) + math.log(1 / 5) + math.log(1 / 3)) / 3)


def test_it_approaches_the_entropy_of_a_markov_chain() -> None:
    rng = np.random.default_rng(0)
    chain = [0]
    for _ in range(100_000):
        chain.append(int(rng.random() < (0.9 if chain[-1] else 0.2)))
    entropies = [-(p * math.log(p) + (1 - p) * math.log(1 - p)) for p in (0.2, 0.9)]
    share = 0.2 / (0.2 + 0.1)  # of time in state 1
    expected = (1 - share) * entropies[0] + share * entropies[1]
    tokens = np.array(chain)
    assert bigram_loss(tokens[:50_000], [tokens[50_000:]], 2) == pytest.approx(expected, rel=0.02)
