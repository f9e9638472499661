"""Which 8-bit format each operand of a linear layer has (Micikevicius et al., FP8 Formats for Deep Learning, 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Role = Literal["input", "weight", "gradient"]
"""Of a tensor in a linear layer; gradient: of the output."""
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS: Mapping[str, Mapping[Role, torch.dtype]] = {
    "e4m3": {"input": E4M3, "weight": E4M3, "gradient": E4M3},
    "hybrid": {"input": E4M3, "weight": E4M3, "gradient": E5M2},
}
"""By precision.fp8_format. Gradients have a wider range and need fewer digits."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def scale_of(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The fp32 number that values are divided by, so that `amax` becomes the largest value of `dtype`.

    amax: fp32, any shape; 0 gives 1. margin: powers of two that are left free above. What is not finite stays so, and
    then makes everything that it scales NaN.
    """
    # amax / 448 may underflow to 0, and x / 0 is infinite.
    scale = (amax / (torch.finfo(dtype).max / 2.0**margin)).clamp(min=_SMALLEST_SCALE)
    return torch.where(amax == 0.0, 1.0, scale)


def to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`, rounded to nearest, ties to even; beyond the largest value: that value."""
    # Conversions of e4m3 give NaN beyond the largest value: clamp first. NaN passes the clamp.
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)
