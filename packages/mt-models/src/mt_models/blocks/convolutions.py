"""Short depthwise causal convolutions of layers, in torch or by the kernel that a run has chosen for them.

Shapes: B batch, S positions, C channels, k taps; the last tap is applied to the position itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.batch_invariance import is_batch_invariant
from mt_core.nn.kernels.choice import Kernels
from mt_models.blocks.shifted_conv import can_shift, shifted_conv

# -- depthwise causal convolution along the sequence: y_t = b + sum_j w_j x_(t - k + 1 + j) ----------
#
# Shapes: B batch, S positions, C channels, k taps; the last tap is applied to the position itself.


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None = None) -> Tensor:
    """x [B, S, C], weight [C, k], bias [C] -> [B, S, C]. past: the k - 1 inputs before x; default zeros."""
    # Decoding in parts has conv1d, whose sums those of a whole sequence equal under batch invariance.
    if past is None and can_shift(x, weight) and not is_batch_invariant():
        y = shifted_conv(x, weight)
        return y if bias is None else y + bias
    extended = with_past(x, weight.shape[1] - 1, past)
    # conv1d takes channels before positions, [B, C, count + S], and weight [C, 1, k] with one group for each
    # channel. No padding: the k - 1 positions in front are the past.
    return F.conv1d(extended.transpose(1, 2), weight[:, None], bias, groups=weight.shape[0]).transpose(1, 2)


def causal_conv_of_segments(x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor) -> Tensor:
    """causal_conv without crossing segment boundaries: segment_ids [B, S]."""
    length, taps = x.shape[1], weight.shape[1]
    # A sum over taps instead of conv1d, which cannot leave out a tap by position. distance 1 is the second to last tap.
    y = x * weight[:, -1]
    for distance in range(1, min(taps, length)):
        # [B, S - distance]: whether the position and the one `distance` before it are of one document
        same_segment = segment_ids[:, distance:] == segment_ids[:, :-distance]
        taken = x[:, :-distance] * same_segment[..., None] * weight[:, -1 - distance]
        y = y + F.pad(taken, (0, 0, distance, 0))
    return y if bias is None else y + bias


def with_past(x: Tensor, count: int, past: Tensor | None) -> Tensor:
    """[B, S, C] -> [B, count + S, C], with `past` [B, count, C] or zeros in front."""
    return F.pad(x, (0, 0, count, 0)) if past is None else torch.cat([past, x], dim=1)


# -- with the activation behind it ----------------------------------------------------------------------


def plain_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None = None, silu: bool = False
) -> Tensor:
    """x [B, S, C], weight [C, k], bias [C] -> [B, S, C] in x's dtype, computed in that of the weight.

    segment_ids [B, S]: documents of a packed sequence, which see nothing of one another. silu: SiLU behind it.
    """
    wide = x.to(weight.dtype)
    if segment_ids is None:
        y = causal_conv(wide, weight, bias)
    else:
        y = causal_conv_of_segments(wide, weight, bias, segment_ids)
    return (F.silu(y) if silu else y).to(x.dtype)


def plain_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """x [B, S, C] behind past [B, k - 1, C] -> [B, S, C], and the last k - 1 inputs [B, k - 1, C]."""
    y = causal_conv(x.to(weight.dtype), weight, bias, past.to(weight.dtype))
    # Cut from [past, new] and not from the new alone, which may be fewer than k - 1.
    return (F.silu(y) if silu else y).to(x.dtype), with_past(x, past.shape[1], past)[:, x.shape[1] :]


class Convolutions(NamedTuple):
    whole: Callable[..., Tensor] = plain_conv
    """`plain_conv` or what computes the same"""
    step: Callable[..., tuple[Tensor, Tensor]] = plain_step
    """`plain_step` or what computes the same"""


PLAIN = Convolutions()
"""Convolutions in torch"""


def picked_convolutions(kernels: Kernels, taps: int) -> Convolutions:
    """What `kernels.causal_conv` says. Raises ConfigError where the named kernel cannot serve."""
    whole = kernels.pick("causal_conv", width=taps, plain=plain_conv)
    step = None if whole is plain_conv else kernels.pick_fused("causal_conv", width=taps)
    return Convolutions(whole, plain_step if step is None else _without_gradients(step))


def _without_gradients(step: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`step`, or `plain_step` where gradients are asked for."""

    def advance(
        x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor, silu: bool = False
    ) -> tuple[Tensor, Tensor]:
        wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        result: tuple[Tensor, Tensor] = (plain_step if wanted else step)(x, weight, bias, past, silu)
        return result

    return advance
