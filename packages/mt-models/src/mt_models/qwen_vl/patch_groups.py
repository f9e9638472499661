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


def window_groups(grids: Sequence[Grid], side: int, merged: int, device: torch.device) -> PatchGroups:
    """The patches of each window of side x side cells; those at the right and lower edges have what is there."""
    groups, count = [], 0
    for rows, columns in grids:
        across = -(-columns // side)
        # The window of each cell, [rows, columns]. Windows are numbered over all images: `count` before this one.
        row, column = torch.arange(rows)[:, None] // side, torch.arange(columns)[None] // side
        groups.append((count + row * across + column).flatten())
        count += -(-rows // side) * across
    return PatchGroups(torch.cat(groups).repeat_interleave(merged), device)


def patch_positions(grids: Sequence[Grid], side: int) -> Tensor:
    """int64 [2, 1, P]: the row and the column of each patch in its image. side: of a cell in patches."""
    found = []
    for rows, columns in grids:
        # [P of the image, 4]: row and column of the cell, row and column within the cell, in the order of the patches
        places = torch.cartesian_prod(*map(torch.arange, (rows, columns, side, side)))
        found.append(torch.stack([places[:, 0] * side + places[:, 2], places[:, 1] * side + places[:, 3]]))
    return torch.cat(found, dim=1)[:, None]
