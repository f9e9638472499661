"""MLX (`quantization` in config.json): groups along the inputs, `weight` uint32 with `scales` and, in the mode
affine, `biases`.

affine: code * scale + bias in the dtype of the scales, codes of 2 to 8 bits in a dense stream, lowest bits first.
mxfp4, mxfp8: E2M1 and e4m3 with exponents for groups of 32; nvfp4: E2M1 with e4m3 scales for groups of 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import decode_e2m1, decode_e8m0, unpack_bits
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
from mt_core.errors import CheckpointError, ConfigError

MODES = ("affine", "mxfp4", "nvfp4", "mxfp8")
KEYS = ("group_size", "bits", "mode")
BITS = (2, 3, 4, 5, 6, 8)
SIZES = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}


@dataclass(frozen=True)
class MlxGroups:
    group: int
    bits: int
    mode: str


@dataclass(frozen=True)
class Mlx:
    """paths: modules with settings of their own. dtype: of what the modes with exponents are dequantized to."""

    default: MlxGroups
    paths: Mapping[str, MlxGroups]
    dtype: torch.dtype

    def claims(self, tensors: ExternalTensors) -> Claims:
        return Claims([self._weight(tensors, module) for module in modules_with(tensors, ".scales")])

    def _weight(self, tensors: ExternalTensors, module: str) -> QuantizedWeight:
        chosen, name = self.paths.get(module, self.default), f"{module}.weight"
        roles = {"weight": name, "scales": f"{module}.scales"}
        info, scales = require(tensors, roles["scales"], name), tensors.infos[roles["scales"]]
        require_dtype(name, info, torch.uint32)
        shape = (*info.shape[:-1], info.shape[-1] * 32 // chosen.bits)
        if shape[-1] % chosen.group:
            raise CheckpointError(f"{name}: {shape[-1]} inputs are no multiple of group_size={chosen.group}")
        grid, of = (*shape[:-1], shape[-1] // chosen.group), f"{name} {list(shape)} of {chosen.bits} bits"
        require_shape(roles["scales"], scales, grid, of=of)
        dtype, ranges = self.dtype, {"scales": "not negative"}
        if chosen.mode == "affine":
            roles["biases"] = f"{module}.biases"
            require_shape(roles["biases"], require(tensors, name, roles["biases"]), grid, of=of)
            for role in ("scales", "biases"):
                require_dtype(roles[role], tensors.infos[roles[role]], torch.float16, torch.bfloat16, torch.float32)
            dtype, ranges = scales.dtype, {"scales": "finite", "biases": "finite"}  # a scale may be negative here
        else:
            require_dtype(roles["scales"], scales, torch.uint8)
            ranges = {} if chosen.mode == "nvfp4" else ranges
        kind = f"int{chosen.bits} with biases" if chosen.mode == "affine" else chosen.mode
        label = f"{kind}, groups of {chosen.group}"
        return QuantizedWeight(name, TensorInfo(shape, dtype), roles, MlxFill(chosen), label, _ranges(ranges))


def _ranges(ranges: Mapping[str, Any]) -> dict[str, Range]:
    return dict(ranges)


@dataclass(frozen=True)
class MlxFill:
    settings: MlxGroups

    def __call__(self, values: Tensor, parts: Parts) -> None:
        flat = values.flatten(0, -2)
        packed, scales = (parts[role].flatten(0, -2) for role in ("weight", "scales"))
        biases = parts["biases"].flatten(0, -2) if "biases" in parts else None
        for part in row_slices(*flat.shape):
            numbers = self._numbers(packed[part], flat.shape[1]).unflatten(1, (-1, self.settings.group))
            if biases is not None:
                decoded = numbers.to(flat.dtype) * scales[part][:, :, None] + biases[part][:, :, None]
            else:
                decoded = numbers * self.factors(scales[part])[:, :, None]
            flat[part] = decoded.flatten(1).to(flat.dtype)

    def _numbers(self, packed: Tensor, columns: int) -> Tensor:
        data = packed.contiguous().view(torch.uint8)
        if self.settings.mode in ("mxfp4", "nvfp4"):
            return decode_e2m1(data)
        if self.settings.mode == "mxfp8":
            return data.view(torch.float8_e4m3fn).float()
        return unpack_bits(packed.view(torch.int32), self.settings.bits, columns)

    def factors(self, scales: Tensor) -> Tensor:
        """The scales in fp32 of formats without biases."""
        return scales.view(torch.float8_e4m3fn).float() if self.settings.mode == "nvfp4" else decode_e8m0(scales)


def scheme_of(config: Mapping[str, Any], dtype: torch.dtype) -> Mlx:
    """config: `quantization` of config.json. Raises ConfigError."""
    paths = {
        name: overrides for name, overrides in config.items() if name not in KEYS and isinstance(overrides, Mapping)
    }
    default = _settings(config)
    return Mlx(default, {name: _settings({**_plain(config), **overrides}) for name, overrides in paths.items()}, dtype)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in KEYS if key in config}


def _settings(config: Mapping[str, Any]) -> MlxGroups:
    mode = str(config.get("mode", "affine"))
    if mode not in MODES:
        raise ConfigError(f"quantization.mode={mode!r} of MLX is not supported; it can be {', '.join(MODES)}")
    group, bits = SIZES.get(mode, (64, 4))
    group, bits = int(config.get("group_size", group)), int(config.get("bits", bits))
    if bits not in BITS:
        raise ConfigError(f"quantization.bits={bits} of MLX is not supported; it can be {BITS}")
    return MlxGroups(group, bits, mode)
