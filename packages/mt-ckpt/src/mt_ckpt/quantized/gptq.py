"""GPTQ as AutoGPTQ and GPTQModel write it (`quant_method: gptq`): [in, out], codes packed along the inputs.

`qweight` int32 [in * bits / 32, out], `qzeros` int32 [groups, out * bits / 32], `scales` [groups, out], and `g_idx`
[in], the group of each input. Value: (code - zero) * scale in the dtype of the scales; the first version of the
format stores zeros less one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import unpack_bits
from mt_ckpt.quantized.weights import (
    SLICE,
    Claims,
    Parts,
    QuantizedWeight,
    modules_with,
    require,
    require_dtype,
    require_matrix,
    require_shape,
)
from mt_core.errors import CheckpointError, ConfigError

BITS = (2, 3, 4, 8)
CODES_A_SLICE = 32
"""So many codes are whole words, whatever their bits."""


@dataclass(frozen=True)
class Gptq:
    """dynamic: regular expressions of modules -> their own bits and group_size."""

    bits: int
    group: int
    zeros_less_one: bool
    dynamic: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    def claims(self, tensors: ExternalTensors) -> Claims:
        return Claims([self._weight(tensors, module) for module in modules_with(tensors, ".qweight")])

    def _weight(self, tensors: ExternalTensors, module: str) -> QuantizedWeight:
        bits, group = self._settings(module)
        roles = {role: f"{module}.{role}" for role in ("qweight", "qzeros", "scales")}
        infos = {role: require(tensors, module, name) for role, name in roles.items()}
        for role in ("qweight", "qzeros"):
            require_dtype(roles[role], infos[role], torch.int32)
        require_dtype(roles["scales"], infos["scales"], torch.float16, torch.bfloat16, torch.float32)
        require_matrix(roles["qweight"], infos["qweight"])
        inputs, outputs = infos["qweight"].shape[0] * 32 // bits, infos["qweight"].shape[1]
        groups = 1 if group == -1 else math.ceil(inputs / group)
        of = f"{module}.weight {[outputs, inputs]} of {bits} bits"
        require_shape(roles["scales"], infos["scales"], (groups, outputs), of=of)
        require_shape(roles["qzeros"], infos["qzeros"], (groups, math.ceil(outputs * bits / 32)), of=of)
        if f"{module}.g_idx" in tensors.infos:
            roles["g_idx"] = f"{module}.g_idx"
            require_shape(roles["g_idx"], tensors.infos[roles["g_idx"]], (inputs,), of=of)
        weight_info = TensorInfo((outputs, inputs), infos["scales"].dtype)
        size = f"groups of {group}" if group != -1 else "a scale for the row"
        fill = GptqFill(bits, inputs if group == -1 else group, self.zeros_less_one)
        kind = f"int{bits} with zero points, {size}"
        return QuantizedWeight(f"{module}.weight", weight_info, roles, fill, kind, {"scales": "positive"})

    def _settings(self, module: str) -> tuple[int, int]:
        for pattern, overrides in self.dynamic:
            if re.match(pattern.removeprefix("+:"), module):
                return int(overrides.get("bits", self.bits)), int(overrides.get("group_size", self.group))
        return self.bits, self.group


@dataclass(frozen=True)
class GptqFill:
    bits: int
    group: int
    zeros_less_one: bool

    def zeros(self, packed: Tensor, outputs: int) -> Tensor:
        """uint8 [groups, outputs]"""
        zeros = unpack_bits(packed, self.bits, outputs)
        # The largest zero point less one and one more is 0 again, as in the kernels.
        return zeros + 1 & (1 << self.bits) - 1 if self.zeros_less_one else zeros

    def __call__(self, values: Tensor, parts: Parts) -> None:
        outputs, inputs = values.shape
        scales, zeros = parts["scales"], self.zeros(parts["qzeros"], outputs).to(torch.int16)
        index = parts["g_idx"].long() if "g_idx" in parts else torch.arange(inputs) // self.group
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(scales):
            raise CheckpointError(
                f"g_idx names groups {int(index.min())} to {int(index.max())}; there are {len(scales)}"
            )
        step = max(CODES_A_SLICE, SLICE // outputs // CODES_A_SLICE * CODES_A_SLICE)
        for first in range(0, inputs, step):
            last = min(first + step, inputs)
            words = parts["qweight"][first * self.bits // 32 : -(-last * self.bits // 32)]
            codes = unpack_bits(words.T.contiguous(), self.bits, last - first).T.to(torch.int16)  # [inputs, outputs]
            groups = index[first:last]
            values[:, first:last] = ((codes - zeros[groups]) * scales[groups]).T


def scheme_of(config: Mapping[str, Any]) -> Gptq:
    """Raises ConfigError for settings that are not supported."""
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        raise ConfigError(
            f"quantization_config.checkpoint_format={layout!r} is not supported; it can be 'gptq' or 'gptq_v2'"
        )
    pack = str(config.get("pack_dtype") or "int32").removeprefix("torch.")
    if pack != "int32":
        raise ConfigError(f"quantization_config.pack_dtype={pack!r} is not supported; it can be 'int32'")
    if (packing := (config.get("meta") or {}).get("packing") or config.get("packing") or "original") != "original":
        raise ConfigError(f"quantization_config: the packing {packing!r} of GPTQ is not supported")
    dynamic = {
        pattern: overrides
        for pattern, overrides in (config.get("dynamic") or {}).items()
        if not pattern.startswith("-:")
    }
    for bits in {
        int(config.get("bits", 4)),
        *(int(overrides["bits"]) for overrides in dynamic.values() if "bits" in overrides),
    }:
        if bits not in BITS:
            raise ConfigError(f"quantization_config.bits={bits} of GPTQ is not supported; it can be {BITS}")
    return Gptq(
        int(config.get("bits", 4)), int(config.get("group_size", 128)), layout == "gptq", tuple(dynamic.items())
    )
