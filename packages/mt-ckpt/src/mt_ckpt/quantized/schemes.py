"""Names of the schemes that `mt convert --quantize` writes; FP8 with a scale for each block of 128 x 128, as
DeepSeek-V3 is published."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.codes import E4M3_MAX, multiply_groups_
from mt_ckpt.quantized.quantizer import Quantizer
from mt_ckpt.quantized.write_compressed_tensors import ByteQuantizer, MxQuantizer, Nvfp4Quantizer, WordQuantizer
from mt_ckpt.quantized.write_packed import AwqQuantizer, GptqQuantizer, MlxQuantizer
from mt_core.errors import ConfigError

BLOCK = 128


@dataclass(frozen=True)
class Fp8BlockQuantizer:
    """exponents: scales are powers of two, in fp32 all the same (DeepSeek-V3.1 and later)."""

    name: str
    exponents: bool
    rows_dim: int = 0
    shares_largest: bool = False

    def objection(self, shape: tuple[int, ...]) -> str | None:
        return None

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        grid = (math.ceil(info.shape[0] / BLOCK), math.ceil(info.shape[1] / BLOCK))
        return {
            "weight": TensorInfo(info.shape, torch.float8_e4m3fn),
            "weight_scale_inv": TensorInfo(grid, torch.float32),
        }

    def encode_rows(self, rows: Tensor, dtype: torch.dtype, largest: float) -> Mapping[str, Tensor]:
        height, width = rows.shape
        filled = torch.nn.functional.pad(rows, (0, -width % BLOCK, 0, -height % BLOCK))
        # [blocks down, 128, blocks across, 128]
        scale = filled.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3)) / E4M3_MAX
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        if self.exponents:
            scale = torch.exp2(scale.log2().ceil())
        factors = 1 / scale[torch.arange(height) // BLOCK]
        codes = multiply_groups_(rows.clone(), factors, BLOCK).clamp_(-E4M3_MAX, E4M3_MAX)
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        return {}

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        config |= {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": list(left)}
        return {"quantization_config": {**config, **({"scale_fmt": "ue8m0"} if self.exponents else {})}}


Build = Callable[[str, int], Quantizer]
"""(name of the scheme, group size) -> what quantizes"""
GROUP = re.compile(r"(.+)-g([0-9]+)")

FIXED: Mapping[str, Callable[[str], Quantizer]] = {
    "fp8-blocks": lambda name: Fp8BlockQuantizer(name, exponents=False),
    "fp8-blocks-ue8m0": lambda name: Fp8BlockQuantizer(name, exponents=True),
    "fp8": lambda name: ByteQuantizer(name, floating=True),
    "int8": lambda name: ByteQuantizer(name, floating=False),
    "nvfp4": Nvfp4Quantizer,
    "mxfp4": lambda name: MxQuantizer(name, 4),
    "mxfp8": lambda name: MxQuantizer(name, 8),
}
GROUPED: Mapping[str, tuple[int, Build]] = {
    "w4a16": (128, lambda name, group: WordQuantizer(name, 4, group)),
    "w4a16-asym": (128, lambda name, group: WordQuantizer(name, 4, group, symmetric=False)),
    "w8a16": (128, lambda name, group: WordQuantizer(name, 8, group)),
    "awq": (128, AwqQuantizer),
    "gptq": (128, lambda name, group: GptqQuantizer(name, 4, group)),
    "gptq-8bit": (128, lambda name, group: GptqQuantizer(name, 8, group)),
    **{
        f"mlx-{bits}bit": (64, lambda name, group, bits=bits: MlxQuantizer(name, bits, group))  # type: ignore[misc]
        for bits in (2, 3, 4, 5, 6, 8)
    },
}
"""Scheme -> its group size, unless `-g32` or another size ends its name."""


def quantizer_named(name: str) -> Quantizer:
    """Raises ConfigError for a scheme that is not known."""
    if name in FIXED:
        return FIXED[name](name)
    match = GROUP.fullmatch(name)
    scheme = match[1] if match else name
    if scheme not in GROUPED or (match and int(match[2]) < 2):
        raise ConfigError(
            f"--quantize {name}: not a scheme of Hugging Face folders; it can be {', '.join((*FIXED, *GROUPED))}, "
            "mxfp4-experts (GPT-OSS), "
            "those with groups followed by their size, such as w4a16-g32"
        )
    size, build = GROUPED[scheme]
    return build(name, int(match[2]) if match else size)
