"""Writes compressed-tensors: integers and FP8 in bytes, integers in words, NVFP4 and MXFP4."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import E2M1_MAX, E4M3_MAX, encode_e2m1, pack_bits
from mt_ckpt.quantized.compressed_tensors import GLOBAL, PACKED, SCALE, SHAPE, ZERO
from mt_ckpt.quantized.quantizer import (
    asymmetric_codes,
    grouped,
    indivisible,
    mx_exponents,
    stored_scale,
    symmetric_codes,
)

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
class ByteQuantizer:
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

    def encode_rows(self, rows: Tensor, dtype: torch.dtype, largest: float) -> Mapping[str, Tensor]:
        if not self.floating:
            codes, scale = symmetric_codes(rows[:, None], 8, dtype)
            return {"weight": codes[:, 0].to(torch.int8), SCALE: scale}
        scale = stored_scale(rows.abs().amax(1, keepdim=True) / E4M3_MAX, dtype)
        codes = (rows / scale.float()).clamp_(-E4M3_MAX, E4M3_MAX)
        return {"weight": codes.to(torch.float8_e4m3fn), SCALE: scale}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        kind = {"num_bits": 8, "type": "float" if self.floating else "int"}
        layout = "float-quantized" if self.floating else "int-quantized"
        return config_of(layout, {**kind, "strategy": "channel", "symmetric": True}, {**kind, **PER_TOKEN}, left)


@dataclass(frozen=True)
class WordQuantizer:
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

    def encode_rows(self, rows: Tensor, dtype: torch.dtype, largest: float) -> Mapping[str, Tensor]:
        groups, half = grouped(rows, self.group), 1 << self.bits - 1
        if self.symmetric:
            codes, scale = symmetric_codes(groups, self.bits, dtype)
            return {PACKED: self._packed((codes + half).flatten(1)), SCALE: scale}
        codes, scale, zeros = asymmetric_codes(groups, self.bits, dtype)
        return {PACKED: self._packed(codes.flatten(1)), SCALE: scale, ZERO: self._packed(zeros.T).T}

    def _packed(self, codes: Tensor) -> Tensor:
        return pack_bits(codes.to(torch.uint8), self.bits)

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {SHAPE: torch.tensor(shape)}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        weights = {"num_bits": self.bits, "type": "int", "strategy": "group", "group_size": self.group}
        return config_of("pack-quantized", {**weights, "symmetric": self.symmetric}, None, left)


@dataclass(frozen=True)
class Nvfp4Quantizer:
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

    def encode_rows(self, rows: Tensor, dtype: torch.dtype, largest: float) -> Mapping[str, Tensor]:
        groups, whole = grouped(rows, self.group), _global_scale(largest)
        scale = stored_scale((groups.abs().amax(-1) / E2M1_MAX * whole).clamp_(max=E4M3_MAX), torch.float8_e4m3fn)
        return {PACKED: encode_e2m1((groups / (scale.float() / whole)[..., None]).flatten(1)), SCALE: scale}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {GLOBAL: torch.tensor([_global_scale(largest)])}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": self.group}
        weights |= {"symmetric": True, "scale_dtype": "torch.float8_e4m3fn"}
        return config_of("nvfp4-pack-quantized", weights, None, left)


def _global_scale(largest: float) -> float:
    # A number of fp32, so that rows are divided by what is stored.
    return torch.tensor(E2M1_MAX * E4M3_MAX / largest if largest > 0 else 1.0, dtype=torch.float32).item()


@dataclass(frozen=True)
class MxQuantizer:
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

    def encode_rows(self, rows: Tensor, dtype: torch.dtype, largest: float) -> Mapping[str, Tensor]:
        groups = grouped(rows, self.group)
        exponents = mx_exponents(groups, 2 if self.bits == 4 else 8)
        numbers = torch.ldexp(groups, 127 - exponents.int()[..., None]).flatten(1)
        if self.bits == 4:
            return {PACKED: encode_e2m1(numbers), SCALE: exponents}
        return {"weight": numbers.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), SCALE: exponents}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        weights = {"num_bits": self.bits, "type": "float", "strategy": "group", "group_size": self.group}
        layout = "mxfp4-pack-quantized" if self.bits == 4 else "mxfp8-quantized"
        return config_of(layout, {**weights, "symmetric": True, "scale_dtype": "torch.uint8"}, None, left)
