"""Projections of attention whose rows are grouped by key-value group in one matrix, with any number of rows each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.name_map import Rule


@dataclass(frozen=True)
class GroupedRows(Rule):
    """Matrices (or biases) of several projections there. One here: of each key-value group its rows of the first, then
    of the second, and so on.

    groups: key-value heads. rows: of each projection in one group.
    """

    groups: int = 1
    rows: tuple[int, ...] = ()

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        # [groups, rows of a group, ...] -> [all rows, ...]
        return torch.cat([x.unflatten(0, (self.groups, -1)) for x in tensors], dim=1).flatten(0, 1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        parts = tensor.unflatten(0, (self.groups, -1)).split(self.rows, dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]
