"""AWQ as AutoAWQ writes it (`quant_method: awq`, version gemm): [in, out], columns of eight in an order of their own.

`qweight` int32 [in, out / 8], `qzeros` int32 [in / group, out / 8], `scales` [in / group, out]. Value: (code - zero)
* scale in the dtype of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import unpack_bits
from mt_ckpt.quantized.weights import (
    Claims,
    Parts,
    QuantizedWeight,
    modules_with,
    require,
    require_dtype,
    require_matrix,
    require_shape,
    row_slices,
)
from mt_core.errors import CheckpointError, ConfigError

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble j of a word is column ORDER[j] of its eight."""
BITS, PER_WORD = 4, 8


@dataclass(frozen=True)
class Awq:
    group: int
    """Inputs that share a scale; -1: all."""
    zero_point: bool = False
    """Whether a weight without zero points is an error."""

    def claims(self, tensors: ExternalTensors) -> Claims:
        return Claims([self._weight(tensors, module) for module in modules_with(tensors, ".qweight")])

    def _weight(self, tensors: ExternalTensors, module: str) -> QuantizedWeight:
        roles = {role: f"{module}.{role}" for role in ("qweight", "scales")}
        info, scales = tensors.infos[roles["qweight"]], require(tensors, module, roles["scales"])
        require_dtype(roles["qweight"], info, torch.int32)
        require_matrix(roles["qweight"], info)
        require_dtype(roles["scales"], scales, torch.float16, torch.bfloat16, torch.float32)
        inputs, outputs = info.shape[0], info.shape[1] * PER_WORD
        group = inputs if self.group == -1 else self.group
        if inputs % group:
            raise CheckpointError(f"{roles['qweight']}: {inputs} inputs are no multiple of group_size={group}")
        of = f"{module}.weight {[outputs, inputs]}"
        require_shape(roles["scales"], scales, (inputs // group, outputs), of=of)
        if self.zero_point:
            require(tensors, module, f"{module}.qzeros")
        if f"{module}.qzeros" in tensors.infos:
            roles["qzeros"] = f"{module}.qzeros"
            require_dtype(roles["qzeros"], tensors.infos[roles["qzeros"]], torch.int32)
            require_shape(roles["qzeros"], tensors.infos[roles["qzeros"]], (inputs // group, info.shape[1]), of=of)
        weight_info = TensorInfo((outputs, inputs), scales.dtype)
        kind = f"int4{' with zero points' if 'qzeros' in roles else ''}, groups of {group}"
        return QuantizedWeight(f"{module}.weight", weight_info, roles, AwqFill(group), kind, {"scales": "positive"})


@dataclass(frozen=True)
class AwqFill:
    group: int

    def __call__(self, values: Tensor, parts: Parts) -> None:
        outputs, inputs = values.shape
        scales = parts["scales"]
        zeros = unordered(parts["qzeros"]) if "qzeros" in parts else torch.full(scales.shape, 1 << BITS - 1)
        for part in row_slices(inputs, outputs):
            groups = torch.arange(part.start, part.stop) // self.group
            codes = unordered(parts["qweight"][part]).to(torch.int16) - zeros[groups].to(torch.int16)
            values[:, part] = (codes * scales[groups]).T


def unordered(packed: Tensor) -> Tensor:
    """int32 [rows, out / 8] -> uint8 [rows, out]."""
    codes = unpack_bits(packed, BITS, packed.shape[1] * PER_WORD).unflatten(1, (-1, PER_WORD))
    places = sorted(range(PER_WORD), key=lambda place: ORDER[place])
    return codes[:, :, places].flatten(1)


def scheme_of(config: Mapping[str, Any]) -> Awq:
    version = str(config.get("version", "gemm")).lower()
    if version not in ("gemm", "exllama", "ipex"):  # these read what gemm wrote
        raise ConfigError(f"quantization_config.version={version!r} of AWQ is not supported; it can be 'gemm'")
    bits = config.get("bits", config.get("w_bit", BITS))
    if bits != BITS:
        raise ConfigError(f"quantization_config.bits={bits} of AWQ is not supported; it can be {BITS}")
    group = int(config.get("group_size", config.get("q_group_size", 128)))
    return Awq(group, zero_point=bool(config.get("zero_point", False)))
