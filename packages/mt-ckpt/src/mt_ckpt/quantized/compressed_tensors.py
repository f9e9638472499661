"""compressed-tensors, the format of llm-compressor and vLLM (`quant_method: compressed-tensors`).

A module `M` has `M.weight` or `M.weight_packed` with `M.weight_scale` beside it. `config_groups` say by regular
expressions, names or classes which modules have which bits; names of tensors decide what is quantized, the groups
how. Values are computed in the dtype of the scales, as the package does: (code - zero point) * scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import decode_e2m1, decode_e2m3, decode_e8m0, unpack_bits, unpack_words
from mt_ckpt.quantized.weights import (
    Claims,
    Parts,
    QuantizedWeight,
    matrices,
    modules_with,
    require,
    require_dtype,
    require_shape,
    row_slices,
)
from mt_core.errors import CheckpointError, ConfigError

PACKED, SCALE, ZERO, SHAPE, ORDER = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
GLOBAL = "weight_global_scale"
UNUSED = (
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "k_scale", "v_scale",
    "q_scale", "k_zero_point", "v_zero_point",
)  # fmt: skip
"""Scales of activations and of the key-value cache."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SPARSE = ("marlin-24", "sparse-bitmask", "sparse-24-bitmask")
PACKED_FORMATS = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized")
PLAIN_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
NVFP4_LARGEST = 6.0 * 448.0


@dataclass(frozen=True)
class Arguments:
    """The `weights` of a group. block: of the strategy "block"; group: of "group" and "tensor_group"."""

    targets: tuple[str, ...]
    bits: int
    floating: bool
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int]
    exponents: bool
    """Whether scales are powers of two, stored as exponents."""


@dataclass(frozen=True)
class CompressedTensors:
    groups: tuple[Arguments, ...]
    ignored: tuple[str, ...]

    def claims(self, tensors: ExternalTensors) -> Claims:
        packed = [self._packed(tensors, module) for module in modules_with(tensors, f".{PACKED}")]
        plain = [
            self._plain(tensors, module)
            for module in modules_with(tensors, f".{SCALE}")
            if f"{module}.{PACKED}" not in tensors.infos
        ]
        return Claims([*packed, *plain], {name for name in tensors.infos if name.rpartition(".")[2] in UNUSED})

    def arguments(self, module: str) -> Arguments:
        """Raises CheckpointError for a quantized module that no group is for, or that `ignore` names."""
        if any(matches(module, name) for name in self.ignored):
            raise CheckpointError(f"{module} is quantized, but quantization_config.ignore names it")
        # As the package: a name first, then a regular expression, then a class.
        for kind in (_is_name, _is_pattern, _is_class):
            for group in self.groups:
                if any(kind(target) and (kind is _is_class or matches(module, target)) for target in group.targets):
                    return group
        raise CheckpointError(f"{module} is quantized, but no group of quantization_config.config_groups is for it")

    def _packed(self, tensors: ExternalTensors, module: str) -> QuantizedWeight:
        group = self.arguments(module)
        if group.floating:
            return _float_packed(tensors, module, group)
        return _integer_packed(tensors, module, group)

    def _plain(self, tensors: ExternalTensors, module: str) -> QuantizedWeight:
        group, name = self.arguments(module), f"{module}.weight"
        info = require(tensors, f"{module}.{SCALE}", name)
        require_dtype(name, info, *((torch.float8_e4m3fn,) if group.floating else (torch.int8,)))
        if len(info.shape) < 2:
            raise CheckpointError(f"{name} has the shape {list(info.shape)}; quantized weights are matrices")
        scale = require(tensors, name, f"{module}.{SCALE}")
        require_dtype(f"{module}.{SCALE}", scale, *((torch.uint8,) if group.exponents else FLOATS))
        roles = {"weight": name, SCALE: f"{module}.{SCALE}"} | _optional(tensors, module, group, (ZERO, ORDER))
        of = f"{name} {list(info.shape)}"
        for role in (SCALE, ZERO):
            if role in roles:
                require_shape(roles[role], tensors.infos[roles[role]], *_scale_shapes(info.shape, group), of=of)
        dtype = torch.bfloat16 if group.exponents else scale.dtype
        kind = f"{'e4m3' if group.floating else f'int{group.bits}'}, {_strategy(group)}"
        ranges = {SCALE: "positive"}
        return QuantizedWeight(name, TensorInfo(info.shape, dtype), roles, PlainFill(group), kind, ranges)  # type: ignore[arg-type]


def _is_name(target: str) -> bool:
    return not _is_pattern(target) and "." in target


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _is_class(target: str) -> bool:
    return not _is_pattern(target) and "." not in target


def matches(module: str, target: str) -> bool:
    """Whether a target that is no class stands for a module."""
    return bool(re.match(target[3:], module)) if _is_pattern(target) else target == module


def _strategy(group: Arguments) -> str:
    if group.strategy in ("group", "tensor_group"):
        return f"groups of {group.group}"
    if group.strategy == "block":
        return f"blocks of {group.block[0]} x {group.block[1]}"
    return f"a scale for the {'row' if group.strategy == 'channel' else 'tensor'}"


def _scale_shapes(shape: tuple[int, ...], group: Arguments) -> list[tuple[int, ...]]:
    rows, columns = shape[-2:]
    lead = shape[:-2]
    if group.strategy == "tensor":
        return [(1,), (), (1, 1)]
    if group.strategy == "channel":
        return [(*lead, rows, 1), (*lead, rows)]
    if group.strategy == "block":
        return [(*lead, math.ceil(rows / group.block[0]), math.ceil(columns / group.block[1]))]
    return [(*lead, rows, math.ceil(columns / group.group))]


def _optional(tensors: ExternalTensors, module: str, group: Arguments, roles: Sequence[str]) -> dict[str, str]:
    present = {role: f"{module}.{role}" for role in roles if f"{module}.{role}" in tensors.infos}
    if not group.symmetric and ZERO in roles and ZERO not in present:
        raise CheckpointError(f"{module}.weight is quantized asymmetrically, but {module}.{ZERO} is missing")
    return present


# -- integers of 1 to 8 bits in words of 32 ------------------------------------------------------------


def _integer_packed(tensors: ExternalTensors, module: str, group: Arguments) -> QuantizedWeight:
    packed, scale = f"{module}.{PACKED}", f"{module}.{SCALE}"
    info, scale_info = tensors.infos[packed], require(tensors, packed, scale)
    require_dtype(packed, info, torch.int32)
    require_dtype(scale, scale_info, *FLOATS)
    shape_name = f"{module}.{SHAPE}"
    require(tensors, packed, shape_name)
    rows, columns = _stored_shape(tensors, shape_name, info)
    dense = math.ceil(columns * group.bits / 32)
    in_words = math.ceil(columns / (32 // group.bits))
    require_shape(packed, info, (rows, dense), (rows, in_words), of=f"{module}.weight {[rows, columns]}")
    shapes = _scale_shapes((rows, columns), group)
    require_shape(scale, scale_info, *shapes, of=f"{module}.weight {[rows, columns]}")
    roles = {PACKED: packed, SCALE: scale, SHAPE: shape_name} | _optional(tensors, module, group, (ZERO, ORDER))
    if ZERO in roles:
        zeros = tensors.infos[roles[ZERO]]
        require_dtype(roles[ZERO], zeros, torch.int32, torch.int8)
        words = {math.ceil(rows * group.bits / 32), math.ceil(rows / (32 // group.bits))}
        wide = [(count, scale_info.shape[-1]) for count in words]
        require_shape(roles[ZERO], zeros, *wide, *shapes, of=f"{module}.weight {[rows, columns]}")
    fill = IntegerFill(group, dense=info.shape[1] == dense)
    kind = f"int{group.bits}{'' if group.symmetric else ' with zero points'}, {_strategy(group)}"
    weight_info = TensorInfo((rows, columns), scale_info.dtype)
    return QuantizedWeight(f"{module}.weight", weight_info, roles, fill, kind, {SCALE: "positive"})


def _stored_shape(tensors: ExternalTensors, name: str, packed: TensorInfo) -> tuple[int, int]:
    require_shape(name, tensors.infos[name], (2,), of="a matrix")
    rows, columns = (int(size) for size in tensors.read(name))
    if rows != packed.shape[0] or columns < 1:
        raise CheckpointError(f"{name} says {[rows, columns]}, but the packed weight has {packed.shape[0]} rows")
    return rows, columns


@dataclass(frozen=True)
class IntegerFill:
    group: Arguments
    dense: bool
    """Whether codes cross words; earlier versions left the rest of a word empty (3, 5, 6 and 7 bits)."""

    def __call__(self, values: Tensor, parts: Parts) -> None:
        rows, columns = values.shape
        bits, scale = self.group.bits, parts[SCALE].reshape(rows if self.group.strategy != "tensor" else 1, -1)
        zeros = self.zeros(parts[ZERO], rows, scale.shape[-1]) if ZERO in parts else None
        unpack = unpack_bits if self.dense else unpack_words
        for part in row_slices(rows, columns):
            codes = unpack(parts[PACKED][part], bits, columns).to(torch.int16) - (1 << bits - 1)
            values[part] = _scaled(codes, scale, zeros, part, self.group, parts.get(ORDER))

    def zeros(self, packed: Tensor, rows: int, groups: int) -> Tensor:
        """[rows, groups]; packed along the rows, unless it is int8."""
        if packed.dtype == torch.int8:
            return packed.reshape(rows, groups)
        bits = self.group.bits
        dense = packed.shape[0] == math.ceil(rows * bits / 32)
        unpack = unpack_bits if dense else unpack_words
        return unpack(packed.T.contiguous(), bits, rows).T.to(torch.int16) - (1 << bits - 1)


def _scaled(
    codes: Tensor, scale: Tensor, zeros: Tensor | None, rows: slice, group: Arguments, order: Tensor | None
) -> Tensor:
    """(codes - zeros) * scale in the dtype of scale [rows or 1, groups or 1] (tensor, channel and group strategies)."""
    factor = scale if scale.shape[0] == 1 else scale[rows]
    offset = None if zeros is None else (zeros if zeros.shape[0] == 1 else zeros[rows]).to(scale.dtype)
    numbers = codes.to(scale.dtype)
    if order is not None:  # the group of each column, -1 where columns are in their order
        index = order.long()
        factor = factor[:, index]
        offset = None if offset is None else offset[:, index]
    elif factor.shape[1] > 1:
        numbers = numbers.unflatten(1, (-1, group.group))
        factor = factor[:, :, None]
        offset = None if offset is None else offset[:, :, None]
    numbers = numbers if offset is None else numbers - offset
    return (numbers * factor).reshape(codes.shape)


# -- numbers in one byte ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainFill:
    group: Arguments

    def __call__(self, values: Tensor, parts: Parts) -> None:
        scale, zeros = parts[SCALE], parts.get(ZERO)
        if self.group.exponents:
            scale = decode_e8m0(scale).to(torch.bfloat16)
        stored = {"weight": parts["weight"], SCALE: scale} | ({} if zeros is None else {ZERO: zeros})
        stacked = [role for role, part in stored.items() if part.ndim == values.ndim]
        for matrix, matrix_parts in matrices(values, stored, stacked):
            self._fill(matrix, matrix_parts["weight"], matrix_parts[SCALE], matrix_parts.get(ZERO), parts)

    def _fill(self, values: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor | None, parts: Parts) -> None:
        rows, columns = values.shape
        for part in row_slices(rows, columns):
            if self.group.strategy == "block":
                values[part] = self._blocks(weight[part], scale, zeros, part)
            else:
                lead = 1 if self.group.strategy == "tensor" else rows
                zero = None if zeros is None else zeros.reshape(lead, -1)
                numbers = weight[part]
                values[part] = _scaled(numbers, scale.reshape(lead, -1), zero, part, self.group, parts.get(ORDER))

    def _blocks(self, weight: Tensor, scale: Tensor, zeros: Tensor | None, rows: slice) -> Tensor:
        height, width = self.group.block
        index = torch.arange(rows.start, rows.stop) // height
        columns = torch.arange(weight.shape[1]) // width
        numbers = weight.to(scale.dtype)
        if zeros is not None:
            numbers = numbers - zeros[index][:, columns].to(scale.dtype)
        return numbers * scale[index][:, columns]


# -- numbers of 4 and 6 bits with exponents of their own ----------------------------------------------------


def _float_packed(tensors: ExternalTensors, module: str, group: Arguments) -> QuantizedWeight:
    packed, scale, whole = f"{module}.{PACKED}", f"{module}.{SCALE}", f"{module}.{GLOBAL}"
    info, scale_info = tensors.infos[packed], require(tensors, packed, scale)
    require_dtype(packed, info, torch.uint8)
    columns = info.shape[-1] * 8 // group.bits
    shape = (*info.shape[:-1], columns)
    require_shape(
        scale, scale_info, (*shape[:-1], math.ceil(columns / group.group)), of=f"{module}.weight {list(shape)}"
    )
    roles, largest = {PACKED: packed, SCALE: scale}, None
    if group.strategy == "tensor_group":
        require_dtype(scale, scale_info, torch.float8_e4m3fn)
        require_shape(whole, require(tensors, packed, whole), (1,), (), of="a whole matrix")
        require_dtype(whole, tensors.infos[whole], *FLOATS)
        roles[GLOBAL] = whole
        largest = largest_of_global
    else:
        require_dtype(scale, scale_info, torch.uint8, torch.float8_e8m0fnu)
    kind = {4: "e2m1", 6: "e2m3"}[group.bits]
    label = f"{'nvfp4' if largest else f'mxfp{group.bits}'}, {kind}, groups of {group.group}"
    ranges = {SCALE: "not negative"} | ({GLOBAL: "positive"} if largest else {})
    return QuantizedWeight(
        f"{module}.weight", TensorInfo(shape, torch.bfloat16), roles, FloatFill(group), label, ranges, largest  # type: ignore[arg-type]
    )  # fmt: skip


def largest_of_global(parts: Parts) -> float:
    """The largest weight: largest code times largest scale, divided by the global one."""
    return parts[SCALE].float().max().item() * 6.0 / parts[GLOBAL].float().reshape(()).item()


@dataclass(frozen=True)
class FloatFill:
    group: Arguments

    def __call__(self, values: Tensor, parts: Parts) -> None:
        flat, packed = values.flatten(0, -2), parts[PACKED].flatten(0, -2)
        scale = parts[SCALE].flatten(0, -2)
        for part in row_slices(*flat.shape):
            numbers = decode_e2m1(packed[part]) if self.group.bits == 4 else decode_e2m3(packed[part], flat.shape[1])
            factors = (
                decode_e8m0(scale[part]) if GLOBAL not in parts else scale[part].float() / parts[GLOBAL].reshape(1)
            )
            product = numbers.unflatten(1, (-1, self.group.group)) * factors[:, :, None]
            flat[part] = product.flatten(1).to(flat.dtype)


# -- the configuration --------------------------------------------------------------------------------


def scheme_of(config: Mapping[str, Any]) -> CompressedTensors:
    """Raises ConfigError for formats and settings that are not supported."""
    status, layout = config.get("quantization_status", "compressed"), config.get("format", "dense")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if (sparse := next((name for name in (layout, sparsity) if name in SPARSE), None)) is not None:
        raise ConfigError(
            f"quantization_config: the format {sparse!r} of sparse matrices is not supported; it is gone from "
            f"compressed-tensors 0.20 too; formats that are: {', '.join((*PACKED_FORMATS, *PLAIN_FORMATS))}"
        )
    if config.get("transform_config"):
        raise ConfigError(
            "quantization_config.transform_config: weights that are multiplied by rotations while the model computes "
            "are not supported"
        )
    if status not in ("compressed", "frozen"):
        raise ConfigError(
            f"quantization_config.quantization_status={status!r} is not supported; it can be 'compressed'"
        )
    groups = config.get("config_groups") or {}
    read = [_arguments(name, group, layout) for name, group in groups.items()]
    return CompressedTensors(tuple(group for group in read if group), tuple(config.get("ignore") or ()))


def _arguments(name: str, group: Any, layout: str) -> Arguments | None:
    if isinstance(group, list):
        raise ConfigError(
            f"quantization_config.config_groups.{name}: names of presets are not supported; write them out"
        )
    weights, layout = group.get("weights"), group.get("format") or layout
    if weights is None:
        return None
    if layout not in (*PACKED_FORMATS, *PLAIN_FORMATS, "mixed-precision", "dense"):
        known = ", ".join((*PACKED_FORMATS, *PLAIN_FORMATS))
        raise ConfigError(f"quantization_config.format={layout!r} is not known; it can be {known}")
    bits, floating = int(weights.get("num_bits", 8)), str(weights.get("type", "int")) == "float"
    if bits not in ((4, 6, 8) if floating else range(1, 9)):
        raise ConfigError(f"quantization_config.config_groups.{name}: weights of {bits} bits are not supported")
    size = weights.get("group_size")
    return Arguments(
        targets=tuple(group.get("targets") or ()),
        bits=bits,
        floating=floating,
        symmetric=bool(weights.get("symmetric", True)),
        strategy=_strategy_of(name, weights),
        group=int(size) if size and size > 0 else 0,
        block=_block_of(weights.get("block_structure")),
        exponents=layout.startswith("mxfp") or "uint8" in str(weights.get("scale_dtype")),
    )


def _strategy_of(name: str, weights: Mapping[str, Any]) -> str:
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        raise ConfigError(f"quantization_config.config_groups.{name}.weights.strategy={strategy!r} is not supported")
    if strategy in ("group", "tensor_group") and not (size and size > 0):
        raise ConfigError(
            f"quantization_config.config_groups.{name}.weights.group_size={size} is not the size of a group"
        )
    return str(strategy)


def _block_of(block: Any) -> tuple[int, int]:
    if isinstance(block, str):  # as older files have it: "128x128"
        block = [int(size) for size in block.split("x")]
    return (int(block[0]), int(block[1])) if block else (128, 128)
