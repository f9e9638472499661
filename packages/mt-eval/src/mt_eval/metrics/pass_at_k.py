"""pass@k (Chen et al. 2021, Evaluating Large Language Models Trained on Code, section 2.1)."""

from __future__ import annotations

import math


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the probability that one of k of the n samples is correct, without bias."""
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must be from 1 to the number of samples, {samples}")
    # comb is 0 for fewer wrong samples than k: one of any k is right. Whole numbers, exact up to the division.
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
