"""Patches of images of any size: their embedding, groups of them for attention, their positions, rotary angles.

Images are rows and columns of merged patches ("cells"), of m x m patches each. Patches of all images are in one row
of length P: image by image, cells row by row, the patches of a cell row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal
from mt_core.nn.linear import linear
from mt_core.nn.main_grad import with_main_gradient
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.rotary import RotaryAngles

Grid = tuple[int, int]
"""Rows and columns of cells of an image."""
TimedGrid = tuple[int, int, int]
"""The same of a view of a video, and a third number whose meaning is the family's; 0 for an image."""


class PatchGroups:
    """Patches in groups of unequal size, padded to the largest for attention.

    group: int64 [P], the number of the group of each patch, counted from 0, on the host. device: of the activations.
    """

    def __init__(self, group: Tensor, device: torch.device) -> None:
        # Example: group = [0, 1, 0], thus sizes = [2, 1] and L = 2
        #   order   [0, 2, 1]          patches, group by group
        #   within  [0, 1, 0]          their places in their groups
        #   slots   [0, 1, 2]          places in [G, L] laid end to end
        #   source  [[0, 2], [1, 0]]   the last one is padding
        #   slot    [0, 2, 1]          the slot of each patch
        # All on the host, where the grids are; then two copies to the device.
        sizes = group.bincount()
        order = group.argsort(stable=True)
        length = int(sizes.max())
        within = torch.arange(len(group)) - (sizes.cumsum(0) - sizes)[group[order]]
        slots = group[order] * length + within
        source = torch.zeros(len(sizes) * length, dtype=torch.long)
        source[slots] = order
        self.source = source.view(-1, length).to(device)  # [G, L]: the patch in each slot, any one in padding
        self.slot = torch.empty_like(slots).index_copy_(0, order, slots).to(device)  # [P]
        is_real = torch.arange(length) < sizes[:, None]
        # None where all groups are of one size, so that attention needs no mask and any kernel serves.
        padding = None if bool(is_real.all()) else is_real.to(device)
        self.pattern = AttentionPattern(causal=False, key_padding=padding)

    def split(self, x: Tensor) -> Tensor:
        """[1, P, ...] -> [G, L, ...]"""
        return x[0][self.source]

    def join(self, x: Tensor) -> Tensor:
        """[G, L, ...] -> [1, P, ...]"""
        return x.flatten(0, 1)[self.slot][None]


def image_groups(grids: Sequence[Grid], merged: int, device: torch.device) -> PatchGroups:
    """All patches of an image. merged: patches of a cell."""
    sizes = torch.tensor([rows * columns * merged for rows, columns in grids])
    return PatchGroups(torch.arange(len(grids)).repeat_interleave(sizes), device)


def patch_positions(grids: Sequence[Grid], side: int) -> Tensor:
    """int64 [2, 1, P]: the row and the column of each patch in its image. side: of a cell in patches."""
    parts = []
    for rows, columns in grids:
        # [P of the image, 4]: row and column of the cell, row and column within the cell, in the order of the patches
        places = torch.cartesian_prod(*map(torch.arange, (rows, columns, side, side)))
        parts.append(torch.stack([places[:, 0] * side + places[:, 2], places[:, 1] * side + places[:, 3]]))
    return torch.cat(parts, dim=1)[:, None]


# -- rotary angles of positions with several coordinates ---------------------------------------------


class AxialAngles(RotaryAngles):
    """cos and sin [B, S, 1, R / 2] in fp32, times `scale`, of which each coordinate has a part of the channels.

    positions: [axes, B, S]. frequencies: those of each axis, in the order of the channels, R / 2 together, on the
    device of the positions.
    """

    def __init__(self, positions: Tensor, frequencies: Sequence[Tensor], scale: float = 1.0) -> None:
        # [B, S, 1, 1] of each axis times its frequencies [R_axis / 2], end to end along the channels
        pairs = zip(positions.to(torch.float32)[..., None, None], frequencies, strict=True)
        angles = torch.cat([places * turns for places, turns in pairs], dim=-1)
        self.cos, self.sin = angles.cos() * scale, angles.sin() * scale
        self.in_window = None


class StillPatchEmbedding(LayoutModule):
    """images [V, C, m p, m p] -> [1, P, H]. The weight has the shape of a convolution's kernel, [H, C, p, p]."""

    weight: Tensor

    def __init__(self, hidden_size: int, channels: int, side: int, std: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.side = side
        self.declare("weight", ParameterLayout((hidden_size, channels, side, side), normal(std)))

    def forward(self, images: Tensor) -> Tensor:
        # [V, C, m, m, p, p]: windows of p by p pixels, row by row of the cell
        patches = images.to(self.weight.dtype).unfold(2, self.side, self.side).unfold(3, self.side, self.side)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)  # [V, m, m, C p p]
        matrix = with_main_gradient(self.weight, lambda kernel: kernel.flatten(1))
        return linear(patches.flatten(0, 2)[None], matrix, None)
