"""A short depthwise causal convolution along the sequence: y_t = b + sum_j w_j x_(t - k + 1 + j).

Shapes: B batch, S positions, C channels, k taps; the last tap is applied to the position itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None = None) -> Tensor:
    """x [B, S, C], weight [C, k], bias [C] -> [B, S, C]. past: the k - 1 inputs before x; default zeros."""
    extended = with_past(x, weight.shape[1] - 1, past)
    # conv1d takes channels before positions, [B, C, count + S], and weight [C, 1, k] with one group for each
    # channel. No padding: the k - 1 positions in front are the past.
    return F.conv1d(extended.transpose(1, 2), weight[:, None], bias, groups=weight.shape[0]).transpose(1, 2)


def causal_conv_of_segments(x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor) -> Tensor:
    """As causal_conv, without crossing segment boundaries: segment_ids [B, S]."""
    length, taps = x.shape[1], weight.shape[1]
    # A sum over taps instead of conv1d, which cannot leave out a tap by position. distance 1 is the second to last tap.
    y = x * weight[:, -1]
    for distance in range(1, min(taps, length)):
        # [B, S - distance]: whether the position and the one `distance` before it are of one document
        own = segment_ids[:, distance:] == segment_ids[:, :-distance]
        taken = x[:, :-distance] * own[..., None] * weight[:, -1 - distance]
        y = y + F.pad(taken, (0, 0, distance, 0))
    return y if bias is None else y + bias


def with_past(x: Tensor, count: int, past: Tensor | None) -> Tensor:
    """[B, S, C] -> [B, count + S, C], with `past` [B, count, C] or zeros in front."""
    return F.pad(x, (0, 0, count, 0)) if past is None else torch.cat([past, x], dim=1)
