"""Short depthwise causal convolution along the sequence, with SiLU behind it or not, in plain torch.

    y_t = f(b + sum_j w_j x_(t - k + 1 + j))          f(z) = z or z sigmoid(z)

Shapes: B batch, S positions, C channels, k taps; the last tap is applied to the position itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.kernels.reference.layers import widened


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None = None, silu: bool = False
) -> Tensor:
    """x [B, S, C], weight [C, k], bias [C] -> [B, S, C] in x's dtype, computed in fp32 or wider. Before the first
    position there are zeros.

    segment_ids [B, S]: numbers of the documents that the sequence is packed from, which see nothing of one another.
    """
    wide, taps = widened(x), widened(weight)
    y = wide * taps[:, -1]
    for distance in range(1, min(weight.shape[1], x.shape[1])):
        before = wide[:, :-distance]
        if segment_ids is not None:
            before = before * (segment_ids[:, distance:] == segment_ids[:, :-distance])[..., None]
        y = y + F.pad(before * taps[:, -1 - distance], (0, 0, distance, 0))
    return _activated(y, bias, silu).to(x.dtype)


def causal_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """x [B, S, C] behind past [B, k - 1, C] -> [B, S, C] in x's dtype, and the last k - 1 of both [B, k - 1, C] in that
    of past."""
    extended = torch.cat([past.to(x.dtype), x], dim=1)
    y = causal_conv(extended, weight, bias, silu=silu)[:, past.shape[1] :]
    return y, torch.cat([past, x.to(past.dtype)], dim=1)[:, x.shape[1] :]


def _activated(y: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    y = y if bias is None else y + widened(bias)
    return F.silu(y) if silu else y
