"""Which patches of a batch of images attend to one another: those of a window, or those of an image.

Images are rows and columns of merged patches ("cells"), of m x m patches each. Patches of all images stand in one row
of length P: image by image, cells row by row, the patches of a cell row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionPattern

Grid = tuple[int, int]
"""Rows and columns of cells of an image."""


class PatchGroups:
    """Patches in groups of unequal size, padded to the largest for attention.

    group: int64 [P], the number of the group of each patch, counted from 0, on the host. device: of the activations.
    """

    def __init__(self, group: Tensor, device: torch.device) -> None:
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


def window_groups(grids: Sequence[Grid], side: int, merged: int, device: torch.device) -> PatchGroups:
    """The patches of each window of side x side cells; those at the right and lower edges have what is there."""
    groups, count = [], 0
    for rows, columns in grids:
        across = -(-columns // side)
        row, column = torch.arange(rows)[:, None] // side, torch.arange(columns)[None] // side
        groups.append((count + row * across + column).flatten())
        count += -(-rows // side) * across
    return PatchGroups(torch.cat(groups).repeat_interleave(merged), device)


def patch_positions(grids: Sequence[Grid], side: int) -> Tensor:
    """int64 [2, 1, P]: the row and the column of each patch in its image. side: of a cell in patches."""
    found = []
    for rows, columns in grids:
        places = torch.cartesian_prod(*map(torch.arange, (rows, columns, side, side)))
        found.append(torch.stack([places[:, 0] * side + places[:, 2], places[:, 1] * side + places[:, 3]]))
    return torch.cat(found, dim=1)[:, None]
