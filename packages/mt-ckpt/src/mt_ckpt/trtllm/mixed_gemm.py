"""The order in which TensorRT-LLM's kernels of integer weights and 16-bit inputs read their weights.

The order depends on the GPU: its loader takes int8 weights of weight-only checkpoints as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64
"""Inputs of one output that follow one another where outputs are interleaved."""
ACTIVATION_BITS = 16


@dataclass(frozen=True)
class KernelOrder:
    """permutes: whether inputs are in the order of the tensor cores' fragments, and codes unsigned. interleaves:
    whether tiles of several outputs are next to one another."""

    permutes: bool
    interleaves: bool


ORDERS = {"sm80": KernelOrder(True, True), "sm90": KernelOrder(True, False), "sm100": KernelOrder(False, False)}
"""sm80: Ampere, Ada (sm89) and RTX Blackwell (sm120). sm90: Hopper. sm100: Blackwell of data centres (sm103)."""


def pack_for_kernel(codes: Tensor, bits: int, order: KernelOrder) -> Tensor:
    """Codes [out, in], int8 of `bits`, as the kernels read them: int8 [in, out * bits / 8].

    The shape is only a name for so many bytes: outputs come first, each (or each few, interleaved) with all its inputs.
    """
    out, inputs = codes.shape
    if order.permutes:
        # Fragments: of 128 bits of inputs, taken as [a, 4, 2], the middle axis comes first.
        fragments = codes.unflatten(1, (-1, ACTIVATION_BITS // bits, 4, 2))
        codes = fragments.transpose(2, 3).flatten(1)
    if order.interleaves:
        # [out / n, n, in / TILE, TILE] -> tiles of n outputs in turn
        tiles = codes.unflatten(0, (-1, ACTIVATION_BITS // bits)).unflatten(2, (-1, TILE))
        codes = tiles.transpose(1, 2)
    flat = codes.reshape(-1)
    if order.permutes:
        flat = _interleaved_registers(flat, bits) + (1 << bits - 1)
    stored = flat.view(torch.uint8) & (1 << bits) - 1
    if bits == 4:
        stored = stored[0::2] | stored[1::2] << 4
    return stored.view(torch.int8).reshape(inputs, out * bits // 8)


def _interleaved_registers(flat: Tensor, bits: int) -> Tensor:
    """Codes of each 32 bits, those at even places before those at odd ones."""
    return flat.unflatten(0, (-1, 32 // bits // 2, 2)).transpose(1, 2).flatten()
