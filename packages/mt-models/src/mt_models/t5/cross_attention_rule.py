"""The layout of keys and values of cross attention in Hugging Face's formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.name_map import Rule


@dataclass(frozen=True)
class HeadwiseKV(Rule):
    """Key and value matrices (or biases) there; rows head by head here, a head's keys before its values."""

    heads: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        # [N D, H] twice -> [N, D, H] twice -> [N, 2 D, H] -> [N 2 D, H]; of biases without H
        return torch.cat([x.unflatten(0, (self.heads, -1)) for x in tensors], dim=1).flatten(0, 1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        by_head = tensor.unflatten(0, (self.heads, 2, -1))
        return [by_head[:, part].flatten(0, 1).contiguous() for part in (0, 1)]
