"""RMSNorm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.kernels.reference.accumulation import widened


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, [..., H] in x's dtype; computed in fp32 or wider.

    zero_centered: the factor is 1 + weight.
    """
    scale = widened(weight) + 1 if zero_centered else widened(weight)
    return F.rms_norm(widened(x), weight.shape, scale, eps).to(x.dtype)
