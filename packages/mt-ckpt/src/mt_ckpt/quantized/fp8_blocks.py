"""FP8 with a scale for each block of a matrix: DeepSeek-V3 and those after it (`quant_method: fp8`).

`X` (e4m3, [..., out, in]) has `X_scale_inv` [..., ceil(out / 128), ceil(in / 128)] beside it, which multiplies,
though its name says inverse; blocks at the edges are cut. Scales are fp32, or exponents (UE8M0) as float8_e8m0fnu or
uint8. With `weight_block_size: null` there is one scale. Experts may be E2M1 instead, two in a byte, with an exponent
for each 32. `X.scale` is what DeepSeek's own files call `X.weight_scale_inv`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import decode_e2m1, decode_e8m0, multiply_e4m3, multiply_groups_
from mt_ckpt.quantized.weights import (
    Claims,
    Parts,
    QuantizedWeight,
    matrices,
    require,
    require_dtype,
    require_shape,
    row_slices,
)
from mt_core.errors import CheckpointError, ConfigError

SUFFIX, PUBLISHED = "_scale_inv", ".scale"
ACTIVATION = (".activation_scale", ".input_scale")
EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)
FP4_BLOCK = (1, 32)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *EXPONENTS)


@dataclass(frozen=True)
class Fp8Blocks:
    """block: rows and columns of a block; None: one scale for a matrix. dtype: of the dequantized weights."""

    block: tuple[int, int] | None
    dtype: torch.dtype = torch.bfloat16

    def claims(self, tensors: ExternalTensors) -> Claims:
        weights: list[QuantizedWeight] = []
        for name, info in tensors.infos.items():
            floats = info.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
            halves = info.dtype in (torch.int8, torch.uint8) and _scale_of(tensors, name) in tensors.infos
            if floats or halves or name + SUFFIX in tensors.infos:
                weights.append(self._weight(tensors, name, info))
        taken = {part for weight in weights for part in weight.parts.values()}
        if alone := [name for name in tensors.infos if name.endswith(SUFFIX) and name not in taken]:
            raise CheckpointError(f"{alone[0]} is the scale of {alone[0].removesuffix(SUFFIX)}, which is missing")
        return Claims(weights, {name for name in tensors.infos if name.endswith(ACTIVATION)})

    def _weight(self, tensors: ExternalTensors, name: str, info: TensorInfo) -> QuantizedWeight:
        require_dtype(name, info, torch.float8_e4m3fn, torch.int8, torch.uint8)
        if len(info.shape) < 2:
            raise CheckpointError(f"{name} has the shape {list(info.shape)}; FP8 weights are matrices")
        scale = _scale_of(tensors, name)
        scale_info = require(tensors, name, scale)
        require_dtype(scale, scale_info, *SCALE_DTYPES)
        halves = info.dtype != torch.float8_e4m3fn  # two numbers of four bits in a byte
        shape = (*info.shape[:-1], 2 * info.shape[-1]) if halves else info.shape
        block = FP4_BLOCK if halves else self.block
        require_shape(scale, scale_info, *_grids(shape, block), of=f"{name} {list(shape)}")
        return QuantizedWeight(
            name,
            TensorInfo(shape, self.dtype),
            {"weight": name, "scale": scale},
            BlockFill(block),
            _label(halves, block),
            {"scale": "positive"},
        )


def _scale_of(tensors: ExternalTensors, name: str) -> str:
    published = name.removesuffix(".weight") + PUBLISHED
    return published if published in tensors.infos and name + SUFFIX not in tensors.infos else name + SUFFIX


def _grids(shape: tuple[int, ...], block: tuple[int, int] | None) -> list[tuple[int, ...]]:
    if block is None:
        ones = (1,) * len(shape)
        return [(), (1,), ones, shape[:-2], (*shape[:-2], 1, 1)]
    return [(*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))]


def _label(halves: bool, block: tuple[int, int] | None) -> str:
    kind = "e2m1" if halves else "e4m3"
    return f"{kind}, a scale for the tensor" if block is None else f"{kind}, blocks of {block[0]} x {block[1]}"


@dataclass(frozen=True)
class BlockFill:
    """Multiplies in fp32, as the publishers' kernels do, and rounds once."""

    block: tuple[int, int] | None
    stacked: tuple[str, ...] = field(default=("weight", "scale"))

    def __call__(self, values: Tensor, parts: Parts) -> None:
        scale = parts["scale"]
        scale = decode_e8m0(scale) if scale.dtype in EXPONENTS else scale.float()
        lead = values.shape[:-2]
        grid = scale.reshape(*lead, *scale.shape[-2:]) if self.block else _one_each(scale, lead)
        for matrix, matrix_parts in matrices(values, {"weight": parts["weight"], "scale": grid}, self.stacked):
            self._fill(matrix, matrix_parts["weight"], matrix_parts["scale"])

    def _fill(self, matrix: Tensor, weight: Tensor, grid: Tensor) -> None:
        rows, columns = matrix.shape
        height, width = self.block or (rows, columns)
        if weight.dtype == torch.float8_e4m3fn and rows * columns:
            scales = grid.repeat_interleave(height, 0)[:rows]  # [rows, blocks of a row]
            if multiply_e4m3(matrix, weight, scales, width):
                return
        for part in row_slices(rows, columns):
            # [rows of the slice, blocks of a row]
            scales = grid[torch.arange(part.start, part.stop) // height]
            stored = weight[part]
            numbers = stored.float() if stored.dtype.is_floating_point else decode_e2m1(stored)
            matrix[part] = multiply_groups_(numbers, scales, width).to(matrix.dtype)


def _one_each(scale: Tensor, lead: tuple[int, ...]) -> Tensor:
    """[..., 1, 1]: one scale for each matrix."""
    count = math.prod(lead)
    return (scale.reshape(-1) if scale.numel() == count else scale.reshape(1).expand(count)).reshape(*lead, 1, 1)


def scheme_of(config: Mapping[str, Any], dtype: torch.dtype) -> Fp8Blocks:
    """Raises ConfigError for settings that are not known."""
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"quantization_config.fmt={config['fmt']!r} is not supported; it can be 'e4m3'")
    block = config.get("weight_block_size", (128, 128) if "weight_block_size" not in config else None)
    if block is None:
        return Fp8Blocks(None, dtype)
    sizes = block if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"quantization_config.weight_block_size={block!r} is not a number of rows and one of columns")
    return Fp8Blocks((block[0], block[1]), dtype)
