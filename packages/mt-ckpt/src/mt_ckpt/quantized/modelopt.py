"""NVIDIA ModelOpt (`quant_method: modelopt`, or `hf_quant_config.json` beside config.json).

FP8: `weight` e4m3 with `weight_scale`, one for the matrix, each row or each block of 128. NVFP4: `weight` uint8 [out,
in / 2], E2M1 with the first number in the low half of a byte, `weight_scale` e4m3 [out, in / 16] and
`weight_scale_2`, fp32, which multiplies: the inverse of the global scale of compressed-tensors. `pre_quant_scale`
[in] multiplies the module's input, here the columns of its weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import decode_e2m1, decode_e8m0
from mt_ckpt.quantized.weights import (
    Claims,
    Parts,
    QuantizedWeight,
    Range,
    modules_with,
    require,
    require_dtype,
    require_shape,
    row_slices,
)
from mt_core.errors import ConfigError

SCALE, SECOND, BEFORE = "weight_scale", "weight_scale_2", "pre_quant_scale"
UNUSED = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "k_proj.k_scale", "v_proj.v_scale")
ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4",
    "W4A8_NVFP4_FP8", "MXFP8", "MIXED_PRECISION",
)  # fmt: skip
NVFP4_GROUP, MXFP8_GROUP, BLOCK = 16, 32, 128


@dataclass(frozen=True)
class ModelOpt:
    dtype: torch.dtype
    """Dtype of the dequantized weights."""

    def claims(self, tensors: ExternalTensors) -> Claims:
        weights = [self._weight(tensors, module) for module in modules_with(tensors, f".{SCALE}")]
        named = {weight.name for weight in weights}
        for name, info in tensors.infos.items():
            if name.endswith(".weight") and name not in named and info.dtype in (torch.float8_e4m3fn, torch.uint8):
                require(tensors, name, f"{name.removesuffix('weight')}{SCALE}")
        return Claims(weights, {name for name in tensors.infos if name.endswith(tuple(f".{role}" for role in UNUSED))})

    def _weight(self, tensors: ExternalTensors, module: str) -> QuantizedWeight:
        name = f"{module}.weight"
        info = require(tensors, f"{module}.{SCALE}", name)
        require_dtype(name, info, torch.float8_e4m3fn, torch.uint8)
        roles = {"weight": name, SCALE: f"{module}.{SCALE}"}
        if info.dtype == torch.uint8:
            return self._nvfp4(tensors, module, roles, info)
        scale = tensors.infos[roles[SCALE]]
        rows, columns = info.shape[-2:]
        shapes = {(): "tensor", (1,): "tensor", (rows,): "row", (rows, 1): "row"}
        blocks = (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
        shapes |= {
            blocks: "block",
            (blocks[0], 1, blocks[1], 1): "block",
            (rows, math.ceil(columns / MXFP8_GROUP)): "group",
        }
        require_shape(roles[SCALE], scale, *shapes, of=f"{name} {list(info.shape)}")
        exponents = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
        if exponents != (shapes[scale.shape] == "group"):
            require_dtype(roles[SCALE], scale, torch.uint8 if not exponents else torch.float32)
        label = {"block": f"blocks of {BLOCK} x {BLOCK}", "group": f"groups of {MXFP8_GROUP}"}
        kind = f"e4m3, {label.get(shapes[scale.shape], f'a scale for the {shapes[scale.shape]}')}"
        return self._with_inputs(
            tensors, module, roles, info.shape, Fp8Fill(shapes[scale.shape]), kind, {SCALE: "positive"}
        )

    def _nvfp4(self, tensors: ExternalTensors, module: str, roles: dict[str, str], info: TensorInfo) -> QuantizedWeight:
        shape = (*info.shape[:-1], 2 * info.shape[-1])
        scale, second = tensors.infos[roles[SCALE]], f"{module}.{SECOND}"
        require_dtype(roles[SCALE], scale, torch.float8_e4m3fn)
        require_shape(roles[SCALE], scale, (*shape[:-1], shape[-1] // NVFP4_GROUP), of=f"{module}.weight {list(shape)}")
        lead = shape[:-2]
        require_shape(second, require(tensors, f"{module}.weight", second), (), (1,), lead, of="a whole matrix")
        ranges: dict[str, Range] = {SCALE: "not negative", SECOND: "positive"}
        kind = f"nvfp4, e2m1, groups of {NVFP4_GROUP}"
        return self._with_inputs(
            tensors, module, {**roles, SECOND: second}, shape, nvfp4_fill, kind, ranges, largest_of_second
        )

    def _with_inputs(
        self, tensors: ExternalTensors, module: str, roles: dict[str, str], shape: tuple[int, ...], fill: Any,
        kind: str, ranges: dict[str, Range], largest: Any = None,
    ) -> QuantizedWeight:  # fmt: skip
        before = f"{module}.{BEFORE}"
        if before in tensors.infos:
            require_shape(before, tensors.infos[before], (shape[-1],), of=f"{module}.weight {list(shape)}")
            roles, fill, kind = {**roles, BEFORE: before}, Smoothed(fill), f"{kind}, inputs scaled"
            ranges = {**ranges, BEFORE: "positive"}
        info = TensorInfo(shape, self.dtype)
        return QuantizedWeight(f"{module}.weight", info, roles, fill, kind, ranges, largest)


def largest_of_second(parts: Parts) -> float:
    """The largest weight: largest code times largest scale times the second one."""
    return parts[SCALE].float().max().item() * 6.0 * parts[SECOND].float().max().item()


@dataclass(frozen=True)
class Fp8Fill:
    """scale_for: "tensor", "row", "block" (of 128 x 128) or "group" (of 32, exponents)."""

    scale_for: str

    def __call__(self, values: Tensor, parts: Parts) -> None:
        scale = parts[SCALE]
        scale = decode_e8m0(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.float()
        rows, columns = values.shape
        for part in row_slices(rows, columns):
            values[part] = (parts["weight"][part].float() * self._factors(scale, part, columns)).to(values.dtype)

    def _factors(self, scale: Tensor, rows: slice, columns: int) -> Tensor:
        if self.scale_for == "tensor":
            return scale.reshape(1, 1)
        if self.scale_for == "row":
            return scale.reshape(-1, 1)[rows]
        if self.scale_for == "group":
            return scale[rows].repeat_interleave(MXFP8_GROUP, 1)[:, :columns]
        grid = scale.reshape(scale.shape[0], -1)[torch.arange(rows.start, rows.stop) // BLOCK]
        return grid.repeat_interleave(BLOCK, 1)[:, :columns]


def nvfp4_fill(values: Tensor, parts: Parts) -> None:
    flat, packed, scale = values.flatten(0, -2), parts["weight"].flatten(0, -2), parts[SCALE].flatten(0, -2)
    second = parts[SECOND].float().reshape(-1)
    per_row = second.repeat_interleave(len(flat) // len(second))[:, None]
    for part in row_slices(*flat.shape):
        factors = scale[part].float() * per_row[part]
        product = decode_e2m1(packed[part]).unflatten(1, (-1, NVFP4_GROUP)) * factors[:, :, None]
        flat[part] = product.flatten(1).to(flat.dtype)


@dataclass(frozen=True)
class Smoothed:
    """What another fill computes, its columns multiplied by what the module's inputs are multiplied by."""

    fill: Any

    def __call__(self, values: Tensor, parts: Parts) -> None:
        exact = torch.empty(values.shape)
        self.fill(exact, parts)
        values.copy_(exact.mul_(parts[BEFORE].float()))


def scheme_of(config: Mapping[str, Any], dtype: torch.dtype) -> ModelOpt:
    """config: `quantization_config`, or the contents of hf_quant_config.json. Raises ConfigError."""
    inner = config.get("quantization", config)
    algorithm = inner.get("quant_algo") or "FP8"
    algorithms = {layer.get("quant_algo") for layer in (inner.get("quantized_layers") or {}).values()} | {algorithm}
    for name in sorted(str(name) for name in algorithms):
        if name not in ALGORITHMS:
            raise ConfigError(f"quant_algo={name!r} of ModelOpt is not supported; it can be {', '.join(ALGORITHMS)}")
    return ModelOpt(dtype)
