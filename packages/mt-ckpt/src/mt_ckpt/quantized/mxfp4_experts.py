"""The experts of GPT-OSS in MXFP4 (`quant_method: mxfp4`), as its published files have them.

`X_blocks` [E, out, in / 32, 16] and `X_scales` [E, out, in / 32], both uint8, stand for the matrices X [E, in, out] of
an unquantized file: two numbers of E2M1 a byte, the first in the low bits, and an exponent (E8M0) for 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import decode_e2m1, decode_e8m0
from mt_ckpt.quantized.weights import (
    Claims,
    Parts,
    QuantizedWeight,
    modules_with,
    require,
    require_dtype,
    require_shape,
)
from mt_core.errors import CheckpointError

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32


@dataclass(frozen=True)
class Mxfp4Experts:
    """dtype: of the dequantized weights."""

    dtype: torch.dtype = torch.bfloat16

    def claims(self, tensors: ExternalTensors) -> Claims:
        names = list(modules_with(tensors, BLOCKS))
        alone = set(modules_with(tensors, SCALES)) - set(names)
        if alone:
            name = min(alone)
            raise CheckpointError(f"{name}{SCALES} is the scale of {name}{BLOCKS}, which is missing")
        return Claims([self._weight(tensors, name) for name in names])

    def _weight(self, tensors: ExternalTensors, name: str) -> QuantizedWeight:
        blocks, scales = tensors.infos[name + BLOCKS], require(tensors, name, name + SCALES)
        require_dtype(name + BLOCKS, blocks, torch.uint8)
        require_dtype(name + SCALES, scales, torch.uint8)
        if len(blocks.shape) != 4 or blocks.shape[-1] != GROUP // 2:
            raise CheckpointError(
                f"{name}{BLOCKS} has the shape {list(blocks.shape)}; it is [experts, out, in / {GROUP}, {GROUP // 2}]"
            )
        require_shape(name + SCALES, scales, blocks.shape[:-1], of=f"{name}{BLOCKS} {list(blocks.shape)}")
        experts, rows, groups, _ = blocks.shape
        return QuantizedWeight(
            name,
            TensorInfo((experts, groups * GROUP, rows), self.dtype),
            {"blocks": name + BLOCKS, "scales": name + SCALES},
            fill_experts,
            "mxfp4, e2m1, groups of 32",
            {"scales": "positive"},
        )


def fill_experts(values: Tensor, parts: Parts) -> None:
    """values: [E, in, out]"""
    # One after another: what is made on the way is one expert's.
    for matrix, blocks, scales in zip(values, parts["blocks"], parts["scales"], strict=True):
        matrix.copy_(decode_blocks(blocks, scales).t())


def decode_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., G, 16] and scales [..., G] -> [..., 32 G] in fp32; every such number is one of bf16."""
    return (decode_e2m1(blocks) * decode_e8m0(scales)[..., None]).flatten(-2)
