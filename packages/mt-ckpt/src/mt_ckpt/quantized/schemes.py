"""Names of the schemes that `mt convert --quantize` writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from mt_ckpt.quantized.quantizer import Quantizer
from mt_ckpt.quantized.write_compressed_tensors import ByteQuantizer, MxQuantizer, Nvfp4Quantizer, WordQuantizer
from mt_ckpt.quantized.write_fp8_blocks import Fp8BlockQuantizer
from mt_ckpt.quantized.write_packed import AwqQuantizer, GptqQuantizer, MlxQuantizer
from mt_core.errors import ConfigError

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
