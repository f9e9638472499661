"""torchao (`quant_method: torchao`) in safetensors files: the header says what class each weight was.

`M.weight` of the class is in `M._weight_qdata`, `M._weight_scale` and so on; its entry of the header's metadata is a
JSON object with `_type`, `_data` and `_tensor_data_names`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
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
    require,
    require_dtype,
    require_shape,
    row_slices,
)
from mt_core.errors import CheckpointError

ACTIVATION = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")
"""Data of a class that is no part of its weight."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TorchAo:
    dtype: torch.dtype
    """Where a class does not say what it was before."""

    def claims(self, tensors: ExternalTensors) -> Claims:
        stated: Mapping[str, str] = getattr(tensors, "metadata", {})
        weights: list[QuantizedWeight] = []
        unused: set[str] = set()
        for name in _names(stated):
            entry = _entry(name, stated)
            if entry.get("_type") == "Tensor":
                continue
            parts = {role: _stored_name(name, role) for role in entry["_tensor_data_names"]}
            weights.append(self._weight(tensors, name, entry, parts))
            unused |= {part for role, part in parts.items() if role in ACTIVATION}
        return Claims(weights, unused)

    def _weight(
        self, tensors: ExternalTensors, name: str, entry: Mapping[str, Any], stored: Mapping[str, str]
    ) -> QuantizedWeight:
        kind = str(entry["_type"])
        if kind not in CLASSES:
            raise CheckpointError(
                f"{name}: weights of torchao's class {kind} are not supported; {', '.join(CLASSES)} are"
            )
        parts = {role: part for role, part in stored.items() if role not in ACTIVATION}
        infos = {role: require(tensors, name, part) for role, part in parts.items()}
        for role in ("qdata", "scale"):
            if role not in parts:
                raise CheckpointError(f"{name}: the header names no {role} of it")
        if entry["_data"].get("is_swizzled_scales"):
            raise CheckpointError(f"{name}: scales in the order of a device (is_swizzled_scales) are not supported")
        return CLASSES[kind](name, entry["_data"], parts, infos, self.dtype)


def _names(stated: Mapping[str, str]) -> list[str]:
    try:
        names = json.loads(stated["tensor_names"])
        return [str(name) for name in names]
    except (KeyError, ValueError, TypeError, RecursionError):
        raise CheckpointError(
            "quant_method=torchao: the header of the safetensors files has no list of tensor_names; weights that "
            "torchao pickled are not read, since that executes code: save them again with safe_serialization=True"
        ) from None


def _entry(name: str, stated: Mapping[str, str]) -> dict[str, Any]:
    try:
        entry = json.loads(stated[name])
        if entry.get("_type") != "Tensor":
            dict(entry["_data"]), list(entry["_tensor_data_names"])
        return dict(entry)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name}: its entry in the header of the safetensors files is damaged: {error}") from None


def _stored_name(name: str, role: str) -> str:
    module, _, parameter = name.rpartition(".")
    return f"{module}._{parameter}_{role}"


def _dtype(data: Mapping[str, Any], key: str, default: torch.dtype) -> torch.dtype:
    said = data.get(key)
    return DTYPES.get(str(said.get("_data") if isinstance(said, Mapping) else said), default)


def _blocks(name: str, data: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    block = tuple(int(size) for size in data.get("block_size") or ())
    block = tuple(full if size == -1 else size for size, full in zip(block, shape, strict=False))
    if len(block) != len(shape) or any(full % size for full, size in zip(shape, block, strict=True)):
        raise CheckpointError(f"{name} {list(shape)}: a block_size of {list(block)} does not divide it")
    return block


# -- the classes ------------------------------------------------------------------------------------------


def _float8(
    name: str, data: Mapping[str, Any], parts: dict[str, str], infos: Mapping[str, TensorInfo], dtype: torch.dtype
) -> QuantizedWeight:
    shape = infos["qdata"].shape
    require_dtype(parts["qdata"], infos["qdata"], torch.float8_e4m3fn, torch.float8_e5m2)
    block = tuple(math.ceil(full / count) for full, count in zip(shape, infos["scale"].shape, strict=False))
    if len(infos["scale"].shape) != len(shape) and math.prod(infos["scale"].shape) != 1:
        require_shape(parts["scale"], infos["scale"], (*shape[:-1], 1), of=f"{name} {list(shape)}")
    block = block if len(block) == len(shape) else shape
    info = TensorInfo(shape, _dtype(data, "dtype", dtype))
    return QuantizedWeight(name, info, parts, AffineFill(block, exact=True), "e4m3" + _of(block), {"scale": "positive"})


def _affine(
    name: str, data: Mapping[str, Any], parts: dict[str, str], infos: Mapping[str, TensorInfo], dtype: torch.dtype
) -> QuantizedWeight:
    """int8 codes, of fewer bits too, with a scale for each block."""
    shape = infos["qdata"].shape
    require_dtype(parts["qdata"], infos["qdata"], torch.int8)
    block = _blocks(name, data, shape)
    grid = tuple(full // size for full, size in zip(shape, block, strict=True))
    for role in ("scale", "zero_point"):
        if role in parts and math.prod(infos[role].shape) != math.prod(grid):
            require_shape(parts[role], infos[role], grid, of=f"{name} {list(shape)}")
    weight_info = TensorInfo(shape, _dtype(data, "dtype", infos["scale"].dtype))
    said = data.get("target_dtype")
    kind = str(said.get("_data") if isinstance(said, Mapping) else said or "int8")
    return _with_inputs(name, weight_info, parts, infos, AffineFill(block), kind + _of(block), {"scale": "positive"})


def _int4(
    name: str, data: Mapping[str, Any], parts: dict[str, str], infos: Mapping[str, TensorInfo], dtype: torch.dtype
) -> QuantizedWeight:
    """qdata uint8 [..., N, K / 2], signed codes, the first low; scale and zero_point [..., K / group, N]."""
    info = infos["qdata"]
    require_dtype(parts["qdata"], info, torch.uint8, torch.int8)
    shape = (*info.shape[:-1], 2 * info.shape[-1])
    group = _blocks(name, data, shape)[-1]
    require_shape(
        parts["scale"], infos["scale"], (*shape[:-2], shape[-1] // group, shape[-2]), of=f"{name} {list(shape)}"
    )
    weight_info = TensorInfo(shape, infos["scale"].dtype)
    return _with_inputs(
        name, weight_info, parts, infos, Int4Fill(group), f"int4, groups of {group}", {"scale": "positive"}
    )


def _mx(
    name: str, data: Mapping[str, Any], parts: dict[str, str], infos: Mapping[str, TensorInfo], dtype: torch.dtype
) -> QuantizedWeight:
    info, group = infos["qdata"], int(data.get("block_size", 32))
    floats = info.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    shape = info.shape if floats else (*info.shape[:-1], 2 * info.shape[-1])
    require_dtype(parts["scale"], infos["scale"], torch.float8_e8m0fnu, torch.uint8)
    require_shape(parts["scale"], infos["scale"], (*shape[:-1], shape[-1] // group), of=f"{name} {list(shape)}")
    weight_info = TensorInfo(shape, _dtype(data, "orig_dtype", dtype))
    return QuantizedWeight(
        name,
        weight_info,
        parts,
        ScaledFill(group),
        f"mx {'e4m3' if floats else 'e2m1'}, groups of {group}",
        {"scale": "positive"},
    )


def _nvfp4(
    name: str, data: Mapping[str, Any], parts: dict[str, str], infos: Mapping[str, TensorInfo], dtype: torch.dtype
) -> QuantizedWeight:
    shape, group = (*infos["qdata"].shape[:-1], 2 * infos["qdata"].shape[-1]), int(data.get("block_size", 16))
    require_dtype(parts["scale"], infos["scale"], torch.float8_e4m3fn)
    require_shape(parts["scale"], infos["scale"], (*shape[:-1], shape[-1] // group), of=f"{name} {list(shape)}")
    weight_info = TensorInfo(shape, _dtype(data, "orig_dtype", dtype))
    return QuantizedWeight(
        name, weight_info, parts, ScaledFill(group), f"nvfp4, groups of {group}", {"scale": "not negative"}
    )


def _of(block: tuple[int, ...]) -> str:
    return f", blocks of {' x '.join(map(str, block))}"


def _with_inputs(
    name: str, info: TensorInfo, parts: dict[str, str], infos: Mapping[str, TensorInfo], fill: Callable[..., None],
    kind: str, ranges: Mapping[str, Range],
) -> QuantizedWeight:  # fmt: skip
    if "act_pre_scale" in parts:  # multiplies the inputs: here the columns
        require_shape(parts["act_pre_scale"], infos["act_pre_scale"], (info.shape[-1],), (), (1,), of=name)
        inner = fill

        def fill(values: Tensor, stored: Parts) -> None:
            inner(values, stored)
            values.mul_(stored["act_pre_scale"])

    return QuantizedWeight(name, info, parts, fill, kind, ranges)


@dataclass(frozen=True)
class AffineFill:
    """exact: the product is made in fp32 and rounded once, as that of floating-point codes is there."""

    block: tuple[int, ...]
    exact: bool = False

    def __call__(self, values: Tensor, parts: Parts) -> None:
        dtype = torch.float32 if self.exact else values.dtype
        grid = tuple(full // size for full, size in zip(values.shape, self.block, strict=True))
        scale = parts["scale"].reshape(grid)
        zeros = parts["zero_point"].reshape(grid).to(dtype) if "zero_point" in parts else None
        for row in range(grid[0]):
            part = slice(row * self.block[0], (row + 1) * self.block[0])
            numbers = parts["qdata"][part].to(dtype)
            if zeros is not None:
                numbers = numbers - self._expanded(zeros[row : row + 1])
            values[part] = (numbers * self._expanded(scale[row : row + 1])).to(values.dtype)

    def _expanded(self, grid: Tensor) -> Tensor:
        for dim, size in enumerate(self.block):
            grid = grid.repeat_interleave(size, dim)
        return grid


@dataclass(frozen=True)
class Int4Fill:
    group: int

    def __call__(self, values: Tensor, parts: Parts) -> None:
        # [..., K / group, N] -> rows [all rows, K / group]
        scale, zeros = (parts[role].transpose(-1, -2).flatten(0, -2) for role in ("scale", "zero_point"))
        flat, packed = values.flatten(0, -2), parts["qdata"].flatten(0, -2).view(torch.uint8)
        for part in row_slices(*flat.shape):
            low, high = packed[part] << 4, packed[part]  # shifted as signed numbers, so that the sign is kept
            codes = torch.stack((low.view(torch.int8) >> 4, high.view(torch.int8) >> 4), -1).flatten(-2)
            numbers = codes.to(flat.dtype).unflatten(1, (-1, self.group))
            flat[part] = (numbers * scale[part][:, :, None] + zeros[part][:, :, None]).flatten(1)


@dataclass(frozen=True)
class ScaledFill:
    group: int

    def __call__(self, values: Tensor, parts: Parts) -> None:
        flat, packed, scale = values.flatten(0, -2), parts["qdata"].flatten(0, -2), parts["scale"].flatten(0, -2)
        whole = parts["per_tensor_scale"].float() if "per_tensor_scale" in parts else None
        for part in row_slices(*flat.shape):
            stored = packed[part]
            numbers = stored.float() if stored.dtype.is_floating_point else decode_e2m1(stored)
            exponents = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
            factors = decode_e8m0(scale[part]) if exponents else scale[part].float()
            factors = factors if whole is None else whole * factors
            flat[part] = (numbers.unflatten(1, (-1, self.group)) * factors[:, :, None]).flatten(1).to(flat.dtype)


CLASSES: Mapping[str, Callable[..., QuantizedWeight]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": _affine,
    "IntxUnpackedToInt8Tensor": _affine,
    "Int4Tensor": _int4,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
