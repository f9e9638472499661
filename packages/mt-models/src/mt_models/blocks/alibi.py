"""ALiBi (Press et al., Train Short, Test Long, 2021): a penalty on scores that grows with distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """[num_heads] slopes in fp32. For a power of two: 2^(-8 (i + 1) / n); else the paper's interleaving."""
    closest = 2 ** math.floor(math.log2(num_heads))
    slopes = _geometric(closest)
    if closest < num_heads:
        # 12 heads: the 8 slopes 2^-1, 2^-2, ... 2^-8 of 8 heads, and of those of 16 heads the first 4
        # that are not among them: 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5.
        slopes += _geometric(2 * closest)[0::2][: num_heads - closest]
    return torch.tensor(slopes, dtype=torch.float32)


def _geometric(count: int) -> list[float]:
    ratio = 2.0 ** (-8.0 / count)
    return [ratio ** (i + 1) for i in range(count)]
