"""FP8 written out in fp64 with NumPy: which numbers a format has, and the nearest of them."""

from __future__ import annotations

import numpy as np

E4M3 = {"digits": 3, "lowest": -6, "largest": 448.0}
"""4 bits of exponent, 3 of fraction: normal numbers from 2^-6 up, steps of 2^-9 below."""
E5M2 = {"digits": 2, "lowest": -14, "largest": 57344.0}
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    """The nearest number of the format, ties to even; the largest one beyond it."""
    form = FORMATS[name]
    x = np.asarray(x, dtype=np.float64)
    magnitude = np.abs(x)
    exponent = np.floor(np.log2(np.where(magnitude == 0, 1.0, magnitude)))
    step = 2.0 ** (np.maximum(exponent, form["lowest"]) - form["digits"])
    nearest = np.round(magnitude / step) * step  # NumPy rounds ties to even
    return np.sign(x) * np.minimum(nearest, form["largest"])


def cast(x: np.ndarray, amax: np.ndarray | float, name: str, margin: int = 0) -> np.ndarray:
    """What x becomes when amax (which spreads over it) is brought to the largest number of the format."""
    scale = np.where(np.asarray(amax) == 0, 1.0, np.asarray(amax) * 2.0**margin / FORMATS[name]["largest"])
    return rounded(x / scale, name) * scale
