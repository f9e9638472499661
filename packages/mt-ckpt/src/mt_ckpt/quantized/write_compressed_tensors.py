"""Writes compressed-tensors: integers and FP8 in bytes, integers in words, NVFP4 and MXFP4."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import encode_e2m1, pack_bits
from mt_ckpt.quantized.compressed_tensors import GLOBAL, PACKED, SCALE, SHAPE, ZERO
from mt_ckpt.quantized.grids import Fp8Grid, Grid, IntegerGrid, MxGrid, Nvfp4Grid, Scales, global_scale
from mt_ckpt.quantized.quantizer import RoundsToGrid, indivisible

PER_TOKEN = {"strategy": "token", "symmetric": True, "dynamic": True}


def config_of(
    layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, left: Sequence[str]
) -> Mapping[str, Any]:
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "format": layout}
    group |= {"input_activations": inputs and dict(inputs), "output_activations": None}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
    }
    config |= {"config_groups": {"group_0": group}, "ignore": list(left), "kv_cache_scheme": None}
    return {"quantization_config": config}


@dataclass(frozen=True)
class ByteQuantizer(RoundsToGrid):
    """int8 or e4m3 with a scale for each row; readers quantize inputs token by token (W8A8)."""

    name: str
    floating: bool
    rows_dim: int = 0
    shares_largest: bool = False

    def objection(self, shape: tuple[int, ...]) -> str | None:
        return None

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        stored = torch.float8_e4m3fn if self.floating else torch.int8
        return {"weight": TensorInfo(info.shape, stored), SCALE: TensorInfo((info.shape[0], 1), info.dtype)}

    @property
    def grid(self) -> Grid:
        return Fp8Grid(None) if self.floating else IntegerGrid(8, None)

    @property
    def input_grid(self) -> Grid:
        return self.grid

    def pack(self, codes: Tensor, scales: Scales) -> Mapping[str, Tensor]:
        return {"weight": codes.flatten(1), SCALE: scales.scale}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        kind = {"num_bits": 8, "type": "float" if self.floating else "int"}
        layout = "float-quantized" if self.floating else "int-quantized"
        return config_of(layout, {**kind, "strategy": "channel", "symmetric": True}, {**kind, **PER_TOKEN}, left)


@dataclass(frozen=True)
class WordQuantizer(RoundsToGrid):
    """Integers of a few bits in words of 32, with a scale for each group."""

    name: str
    bits: int
    group: int
    symmetric: bool = True
    rows_dim: int = 0
    shares_largest: bool = False

    def objection(self, shape: tuple[int, ...]) -> str | None:
        return indivisible(shape, columns=self.group)

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        rows, columns = info.shape
        groups = columns // self.group
        parts = {PACKED: TensorInfo((rows, math.ceil(columns * self.bits / 32)), torch.int32)}
        parts |= {SCALE: TensorInfo((rows, groups), info.dtype), SHAPE: TensorInfo((2,), torch.int64)}
        if not self.symmetric:
            parts[ZERO] = TensorInfo((math.ceil(rows * self.bits / 32), groups), torch.int32)
        return parts

    @property
    def grid(self) -> Grid:
        return IntegerGrid(self.bits, self.group, self.symmetric)

    def pack(self, codes: Tensor, scales: Scales) -> Mapping[str, Tensor]:
        if scales.zeros is None:
            # From -2^(bits - 1) on: stored from 0 on.
            unsigned = codes.flatten(1).to(torch.int16) + (1 << self.bits - 1)
            return {PACKED: self._packed(unsigned), SCALE: scales.scale}
        return {PACKED: self._packed(codes.flatten(1)), SCALE: scales.scale, ZERO: self._packed(scales.zeros.T).T}

    def _packed(self, codes: Tensor) -> Tensor:
        return pack_bits(codes.to(torch.uint8), self.bits)

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {SHAPE: torch.tensor(shape)}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        weights = {"num_bits": self.bits, "type": "int", "strategy": "group", "group_size": self.group}
        return config_of("pack-quantized", {**weights, "symmetric": self.symmetric}, None, left)


@dataclass(frozen=True)
class Nvfp4Quantizer(RoundsToGrid):
    """E2M1 with e4m3 scales for groups of 16 and one fp32 scale for the matrix, which divides."""

    name: str
    group: int = 16
    rows_dim: int = 0
    shares_largest: bool = True

    def objection(self, shape: tuple[int, ...]) -> str | None:
        return indivisible(shape, columns=self.group)

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        rows, columns = info.shape
        return {
            PACKED: TensorInfo((rows, columns // 2), torch.uint8),
            SCALE: TensorInfo((rows, columns // self.group), torch.float8_e4m3fn),
            GLOBAL: TensorInfo((1,), torch.float32),
        }

    @property
    def grid(self) -> Grid:
        return Nvfp4Grid(self.group)

    def value_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Nothing in the files says another.
        return torch.bfloat16

    def pack(self, codes: Tensor, scales: Scales) -> Mapping[str, Tensor]:
        return {PACKED: encode_e2m1(codes.float().flatten(1)), SCALE: scales.scale}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {GLOBAL: torch.tensor([global_scale(largest)])}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": self.group}
        weights |= {"symmetric": True, "scale_dtype": "torch.float8_e4m3fn"}
        return config_of("nvfp4-pack-quantized", weights, None, left)


@dataclass(frozen=True)
class MxQuantizer(RoundsToGrid):
    """E2M1 or e4m3 with an exponent for each group of 32."""

    name: str
    bits: int
    group: int = 32
    rows_dim: int = 0
    shares_largest: bool = False

    def objection(self, shape: tuple[int, ...]) -> str | None:
        return indivisible(shape, columns=self.group)

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        rows, columns = info.shape
        stored = (
            {PACKED: TensorInfo((rows, columns // 2), torch.uint8)}
            if self.bits == 4
            else {"weight": TensorInfo(info.shape, torch.float8_e4m3fn)}
        )
        return {**stored, SCALE: TensorInfo((rows, columns // self.group), torch.uint8)}

    @property
    def grid(self) -> Grid:
        return MxGrid(self.bits, self.group)

    def value_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Nothing in the files says another.
        return torch.bfloat16

    def pack(self, codes: Tensor, scales: Scales) -> Mapping[str, Tensor]:
        if self.bits == 4:
            return {PACKED: encode_e2m1(codes.float().flatten(1)), SCALE: scales.scale}
        return {"weight": codes.flatten(1), SCALE: scales.scale}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        weights = {"num_bits": self.bits, "type": "float", "strategy": "group", "group_size": self.group}
        layout = "mxfp4-pack-quantized" if self.bits == 4 else "mxfp8-quantized"
        return config_of(layout, {**weights, "symmetric": True, "scale_dtype": "torch.uint8"}, None, left)
