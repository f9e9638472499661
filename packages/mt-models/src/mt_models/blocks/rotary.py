"""Rotary position embedding (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.nn.kernels.request import Feature


def inverse_frequencies(rotary_dim: int, base: float) -> Tensor:
    """[rotary_dim / 2] angles per position, in fp32: base^(-2i / rotary_dim).

    Rounded as in Megatron and transformers: at position 100,000 an ulp of a frequency is 0.006 of an angle.
    """
    return 1.0 / wavelengths(rotary_dim, base)


def wavelengths(rotary_dim: int, base: float | Tensor, device: torch.device | None = None) -> Tensor:
    """[rotary_dim / 2] positions per radian, in fp32: base^(2i / rotary_dim)."""
    return base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim)


class RotaryAngles:
    """cos and sin of the angles of one forward pass: [B or 1, S, 1, rotary_dim / 2] in fp32, times `scale`.

    frequencies: on the device of the positions. in_window: the angles of layers with a sliding window, if these use
    other frequencies.
    """

    def __init__(
        self,
        position_ids: Tensor,
        frequencies: Tensor,
        scale: float = 1.0,
        in_window: RotaryAngles | None = None,
    ) -> None:
        # [B or 1, S, 1, 1] * [R / 2]: the 1 broadcasts over heads. fp32, since bf16 has no odd integers above 256.
        angles = position_ids.to(torch.float32)[..., None, None] * frequencies
        self.cos, self.sin = angles.cos() * scale, angles.sin() * scale
        self.in_window = in_window

    def within(self, window: int | None) -> RotaryAngles:
        """The angles of a layer with this window."""
        return self if window is None or self.in_window is None else self.in_window


def rotary_features(config: object) -> tuple[Feature, ...] | None:
    """Requirements for the kernel `rotary`; None without rotary positions. Position ids are part of the batch."""
    # Llama-like families have no such key: they are rotary.
    if getattr(config, "position_embedding_type", "rope") != "rope":
        return None
    head_dim = getattr(config, "head_dim", 0)
    partial: tuple[Feature, ...] = ("partial",) if getattr(config, "rotary_dim", head_dim) != head_dim else ()
    interleaved: tuple[Feature, ...] = ("interleaved",) if getattr(config, "rotary_interleaved", False) else ()
    return ("batched_angles", *partial, *interleaved)


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated in their own dtype, as Hugging Face's models do; the kernels rotate in fp32."""
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R channels of x [B, S, N, D] by cos and sin [B or 1, S, 1, R / 2]; the others are unchanged.

    interleaved: pairs are adjacent channels (2i, 2i + 1); otherwise (i, i + R / 2).
    """
    rotary_dim = 2 * cos.shape[-1]
    turned, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    pair = (first * cos - second * sin, first * sin + second * cos)
    # stack puts the two of a pair side by side again, [..., R / 2, 2] -> [..., R]
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned
