"""Writes FP8 with a scale for each block of 128 x 128, as DeepSeek-V3 is published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import E4M3_MAX, multiply_groups_

BLOCK = 128


@dataclass(frozen=True)
class Fp8BlockQuantizer:
    """exponents: scales are powers of two, in fp32 all the same (DeepSeek-V3.1 and later)."""

    name: str
    exponents: bool
    rows_dim: int = 0
    shares_largest: bool = False

    def objection(self, shape: tuple[int, ...]) -> str | None:
        return None

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        grid = (math.ceil(info.shape[0] / BLOCK), math.ceil(info.shape[1] / BLOCK))
        return {
            "weight": TensorInfo(info.shape, torch.float8_e4m3fn),
            "weight_scale_inv": TensorInfo(grid, torch.float32),
        }

    def encode_rows(self, rows: Tensor, dtype: torch.dtype, largest: float) -> Mapping[str, Tensor]:
        height, width = rows.shape
        filled = torch.nn.functional.pad(rows, (0, -width % BLOCK, 0, -height % BLOCK))
        # [blocks down, 128, blocks across, 128]
        scale = filled.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3)) / E4M3_MAX
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        if self.exponents:
            scale = torch.exp2(scale.log2().ceil())
        factors = 1 / scale[torch.arange(height) // BLOCK]
        codes = multiply_groups_(rows.clone(), factors, BLOCK).clamp_(-E4M3_MAX, E4M3_MAX)
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        config |= {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": list(left)}
        return {"quantization_config": {**config, **({"scale_fmt": "ue8m0"} if self.exponents else {})}}
