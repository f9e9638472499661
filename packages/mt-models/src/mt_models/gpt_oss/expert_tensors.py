"""The experts of GPT-OSS in Hugging Face's files: one tensor per layer, gate and up in alternating columns.

E experts, H hidden size, F inner width. Matrices are stored [in, out] in the files, [out, in] here. The published
files have the matrices in MXFP4, in the order [out, in].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.errors import CheckpointError
from mt_core.name_map import Rule

# -- MXFP4, the dtype of the published experts (OCP Microscaling Formats, 2023) ----------------------
#
# Along a row, 32 numbers of 4 bits (sign, two bits of exponent, one of mantissa) have one factor, a power of two whose
# 8-bit exponent is stored (E8M0: 2^(e - 127), 255 for NaN). A byte holds two numbers, the first in its low half.

# E2M1: exponent bias 1, the two smallest magnitudes without an implicit leading 1. By the three low bits.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., G, 16] and scales [..., G], both uint8 -> [..., 32 G] in bf16, which holds every such number."""
    # A look-up of whole bytes, [..., G, 16] -> [..., G, 16, 2]. int: an index of uint8 would be read as a mask.
    numbers = _numbers_of_bytes(blocks.device)[blocks.int()].flatten(-2)  # [..., G, 32]
    # The dtype converts 255 to NaN, which 2.0 ** (scales - 127) would not.
    factors = scales.view(torch.float8_e8m0fnu).to(torch.float32)
    return (numbers * factors[..., None]).flatten(-2).to(torch.bfloat16)


def _numbers_of_bytes(device: torch.device) -> Tensor:
    """[256, 2] fp32: the two numbers of each byte."""
    halves = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=device)
    byte = torch.arange(256, device=device)
    # The low four bits are the first number of a row.
    return torch.stack((halves[byte % 16], halves[byte // 16]), -1)


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


@dataclass(frozen=True)
class QuantizedMatrices(Rule):
    """Blocks [E, out, in / 32, 16] and scales [E, out, in / 32] there; [E, out, in] in bf16 here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        blocks, scales = tensors
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape[:-1] != scales.shape:
            raise CheckpointError(
                f"{' and '.join(self.sources)} are {blocks.dtype} {list(blocks.shape)} and {scales.dtype} "
                f"{list(scales.shape)}; MXFP4 is torch.uint8 [..., blocks, 16] and torch.uint8 [..., blocks]"
            )
        values = blocks.new_empty((*blocks.shape[:2], 32 * blocks.shape[2]), dtype=torch.bfloat16)
        for matrix, block, scale in zip(values, blocks, scales, strict=True):  # what is made on the way is one expert's
            matrix.copy_(dequantize(block, scale))
        return values


@dataclass(frozen=True)
class QuantizedInterleavedMatrices(QuantizedMatrices):
    """The same with gate and up in alternate rows there, halves here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return halves(super().import_value(tensors))


def halves(rows: Tensor) -> Tensor:
    """[E, 2F, H], gate and up in turn -> all gate rows, then all up rows."""
    # g0 u0 g1 u1 ... -> g0 g1 ... u0 u1 ...
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1)


def in_turn(rows: Tensor) -> Tensor:
    """The inverse of halves."""
    joined = torch.empty_like(rows)
    joined[:, 0::2], joined[:, 1::2] = rows.chunk(2, 1)
    return joined
