"""Rotary angles of positions with several coordinates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mt_models.blocks.rotary import RotaryAngles


class AxialAngles(RotaryAngles):
    """cos and sin [B, S, 1, R / 2] in fp32, times `scale`, of which each coordinate has a part of the channels.

    positions: [axes, B, S]. frequencies: those of each axis, in the order of the channels, R / 2 together, on the
    device of the positions.
    """

    def __init__(self, positions: Tensor, frequencies: Sequence[Tensor], scale: float = 1.0) -> None:
        # [B, S, 1, 1] of each axis times its frequencies [R_axis / 2], end to end along the channels
        own = zip(positions.to(torch.float32)[..., None, None], frequencies, strict=True)
        angles = torch.cat([places * turns for places, turns in own], dim=-1)
        self.cos, self.sin = angles.cos() * scale, angles.sin() * scale
        self.in_window = None
