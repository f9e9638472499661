"""Writes the layouts of AWQ (AutoAWQ, gemm) and GPTQ, both [in, out], and MLX's groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.awq import ORDER, PER_WORD
from mt_ckpt.quantized.codes import pack_bits
from mt_ckpt.quantized.grids import Grid, IntegerGrid, Scales, in_groups
from mt_ckpt.quantized.quantizer import RoundsToGrid, indivisible


def half_precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales: kernels for these layouts have no fp32."""
    return torch.float16 if dtype == torch.float32 else dtype


@dataclass(frozen=True)
class AwqQuantizer(RoundsToGrid):
    """4 bits with zero points. Without calibration nothing is scaled."""

    name: str
    group: int
    rows_dim: int = 1
    shares_largest: bool = False

    def objection(self, shape: tuple[int, ...]) -> str | None:
        return indivisible(shape, rows=PER_WORD, columns=self.group)

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        rows, columns = info.shape
        groups = columns // self.group
        return {
            "qweight": TensorInfo((columns, rows // PER_WORD), torch.int32),
            "qzeros": TensorInfo((groups, rows // PER_WORD), torch.int32),
            "scales": TensorInfo((groups, rows), half_precision(info.dtype)),
        }

    @property
    def grid(self) -> Grid:
        return IntegerGrid(4, self.group, symmetric=False)

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return half_precision(dtype)

    def pack(self, codes: Tensor, scales: Scales) -> Mapping[str, Tensor]:
        assert scales.zeros is not None
        packed = {"qweight": _in_order(codes.flatten(1).T), "qzeros": _in_order(scales.zeros.T)}
        return {**packed, "scales": scales.scale.T}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        config = {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        return {"quantization_config": {**config, "modules_to_not_convert": list(left)}}


def _in_order(codes: Tensor) -> Tensor:
    """[in, out] -> int32 [in, out / 8] in AWQ's order of columns."""
    ordered = codes.to(torch.uint8).unflatten(1, (-1, PER_WORD))[:, :, list(ORDER)]
    return pack_bits(ordered.flatten(1), 4)


@dataclass(frozen=True)
class GptqQuantizer(RoundsToGrid):
    """4 or 8 bits, symmetric, in the first version of the format, whose zero points are stored less one."""

    name: str
    bits: int
    group: int
    rows_dim: int = 1
    shares_largest: bool = False

    def objection(self, shape: tuple[int, ...]) -> str | None:
        return indivisible(shape, rows=32 // self.bits, columns=self.group)

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        rows, columns = info.shape
        groups = columns // self.group
        return {
            "qweight": TensorInfo((columns * self.bits // 32, rows), torch.int32),
            "qzeros": TensorInfo((groups, rows * self.bits // 32), torch.int32),
            "scales": TensorInfo((groups, rows), half_precision(info.dtype)),
            "g_idx": TensorInfo((columns,), torch.int32),
        }

    @property
    def grid(self) -> Grid:
        return IntegerGrid(self.bits, self.group)

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return half_precision(dtype)

    def pack(self, codes: Tensor, scales: Scales) -> Mapping[str, Tensor]:
        half = 1 << self.bits - 1
        packed = pack_bits((codes.flatten(1).to(torch.int16) + half).to(torch.uint8), self.bits)
        zeros = torch.full(scales.scale.T.shape, half - 1, dtype=torch.uint8)
        return {"qweight": packed.T, "qzeros": pack_bits(zeros, self.bits), "scales": scales.scale.T}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {"g_idx": (torch.arange(shape[1]) // self.group).int()}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        config = {"quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": False, "sym": True}
        rules: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in left}
        return {"quantization_config": {**config, "checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": rules}}


@dataclass(frozen=True)
class MlxQuantizer:
    """Groups with a scale and a bias, chosen as mlx does: the number of larger magnitude is met exactly."""

    name: str
    bits: int
    group: int
    rows_dim: int = 0
    shares_largest: bool = False

    def objection(self, shape: tuple[int, ...]) -> str | None:
        return indivisible(shape, columns=max(self.group, 32))

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        rows, columns = info.shape
        grid = TensorInfo((rows, columns // self.group), info.dtype)
        return {
            "weight": TensorInfo((rows, columns * self.bits // 32), torch.uint32),
            "scales": grid,
            "biases": grid,
        }

    def encode_rows(self, rows: Tensor, dtype: torch.dtype, largest: float) -> Mapping[str, Tensor]:
        groups, most = in_groups(rows, self.group), (1 << self.bits) - 1
        low, high = groups.amin(-1), groups.amax(-1)
        down = low.abs() > high.abs()
        edge = torch.where(down, low, high)
        scale = ((high - low) / most).clamp_(min=1e-7)
        scale = torch.where(down, scale, -scale)
        steps = (edge / scale).round_()
        scale = torch.where(steps != 0, edge / torch.where(steps != 0, steps, torch.ones_like(steps)), scale).to(dtype)
        bias = torch.where(steps != 0, edge, torch.zeros_like(edge)).to(dtype)
        codes = ((groups - bias.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, most)
        packed = pack_bits(codes.flatten(1).to(torch.uint8), self.bits)
        return {"weight": packed.view(torch.uint32), "scales": scale, "biases": bias}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        config = {"group_size": self.group, "bits": self.bits, "mode": "affine"}
        # Both keys, as mlx-lm writes them: programs look for either.
        return {"quantization": config, "quantization_config": config}
