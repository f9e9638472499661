"""The experts of GPT-OSS in Hugging Face's files: one tensor per layer, gate and up in alternating columns.

E experts, H hidden size, F inner width. Matrices are stored [in, out] in the files, [out, in] here. The published
files have the matrices in MXFP4, which is dequantized before these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.name_map import Rule


@dataclass(frozen=True)
class InterleavedBias(Rule):
    """[E, 2F], gate and up in turn there, halves here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        # As a matrix of one column: [E, 2F] -> [E, 2F, 1]
        return halves(tensors[0].unsqueeze(-1)).squeeze(-1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [in_turn(tensor.unsqueeze(-1)).squeeze(-1)]


@dataclass(frozen=True)
class InterleavedMatrices(Rule):
    """[E, H, 2F] with gate and up in turn there, [E, 2F, H] with halves here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return halves(tensors[0].transpose(1, 2))

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [in_turn(tensor).transpose(1, 2).contiguous()]


@dataclass(frozen=True)
class TransposedMatrices(Rule):
    """[E, in, out] there, [E, out, in] here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].transpose(1, 2).contiguous()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.transpose(1, 2).contiguous()]


def halves(rows: Tensor) -> Tensor:
    """[E, 2F, H], gate and up in turn -> all gate rows, then all up rows."""
    # g0 u0 g1 u1 ... -> g0 g1 ... u0 u1 ...
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1)


def in_turn(rows: Tensor) -> Tensor:
    """The inverse of halves."""
    joined = torch.empty_like(rows)
    joined[:, 0::2], joined[:, 1::2] = rows.chunk(2, 1)
    return joined
