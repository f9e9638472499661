"""Sound at another rate of samples, by a windowed sinc (Smith, *Digital Audio Resampling*, 1984)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ZERO_CROSSINGS = 24
"""Zeros of the sinc on either side of its centre, within the window."""
PASSED = 0.95
"""Frequencies that pass, as a part of those that both rates can have."""


def resampled_length(samples: int, rate: int, wanted: int) -> int:
    """Samples at the wanted rate."""
    return -(-samples * wanted // rate)


def resample(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """fp32 [n] at `rate` -> fp32 [ceil(n wanted / rate)]; sound of the wanted rate is as it is. Beyond the ends there
    is silence."""
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    step, phases = rate // common, wanted // common
    length = resampled_length(len(samples), rate, wanted)
    cut = PASSED * min(1.0, wanted / rate)
    reach = math.ceil(ZERO_CROSSINGS / cut)
    rounds = -(-length // phases)
    # Output phases k + phase is at (k step + phase step / phases) samples: within a phase the fraction is the same, so
    # that all its outputs have the weights of one filter.
    padded = np.zeros(reach + (rounds + 1) * step + 2 * reach, np.float64)
    padded[reach : reach + len(samples)] = samples[: len(padded) - reach]
    resampled = np.empty((rounds, phases), np.float32)
    for phase in range(phases):
        first, fraction = divmod(phase * step, phases)
        places = np.arange(-reach + 1, reach + 1, dtype=np.float64) - fraction / phases
        weights = windowed_sinc(places, cut, reach)
        # [rounds, 2 reach]: what is around each output, which begins `reach - 1` samples before it.
        around = np.lib.stride_tricks.sliding_window_view(padded[first + 1 :], 2 * reach)[::step][:rounds]
        resampled[:, phase] = around @ weights
    return resampled.reshape(-1)[:length]


def windowed_sinc(distance: NDArray[np.floating], cut: float, reach: int) -> NDArray[np.float64]:
    """Weights of samples at these distances, in samples. cut: the highest frequency, as a part of the half rate."""
    window = np.cos(np.pi / 2 * np.clip(distance / reach, -1.0, 1.0)) ** 2
    weights: NDArray[np.float64] = cut * np.sinc(cut * distance) * window
    return weights
