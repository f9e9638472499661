"""LayerNorm (Ba et al., 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.kernels.reference.accumulation import widened


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, [..., H] in x's dtype.

    Computed in fp32 or wider. zero_centered: the factor is 1 + weight.
    """
    scale = widened(weight) + 1 if zero_centered else widened(weight)
    return F.layer_norm(widened(x), weight.shape, scale, widened(bias), eps).to(x.dtype)
