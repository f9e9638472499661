"""Which kind of quantization a configuration names, and its tensors as an unquantized file has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.quantized import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8_blocks,
    gptq,
    mlx,
    modelopt,
    mxfp4_experts,
    torchao,
)
from mt_ckpt.quantized.weights import DequantizedTensors, Scheme
from mt_core.config_map import QUANTIZATION_KEYS, unquantized
from mt_core.errors import ConfigError

BESIDE = "hf_quant_config.json"
"""What ModelOpt writes beside config.json."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
METHODS = (
    "awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4 (gpt-oss)", "mxfp8", "torchao",
)  # fmt: skip


def dequantized(tensors: ExternalTensors, external: Mapping[str, Any]) -> tuple[ExternalTensors, dict[str, Any]]:
    """The tensors, and config.json, as those of an unquantized folder.

    external: config.json, with the contents of hf_quant_config.json under that name where there is one. Raises
    ConfigError for a kind that is not known, and CheckpointError for tensors that are not what the configuration says.
    """
    scheme = scheme_of(external)
    plain = {key: value for key, value in external.items() if key != BESIDE}
    if scheme is None:
        return tensors, plain
    return DequantizedTensors(tensors, scheme.claims(tensors)), unquantized(plain)


def scheme_of(external: Mapping[str, Any]) -> Scheme | None:
    """None: the folder is not quantized."""
    config, key = _settings(external)
    if config is None:
        return None
    dtype = _plain_dtype(external)
    # MLX's settings have no name; mlx-lm repeats them as quantization_config.
    if "quant_method" not in config and "group_size" in config:
        return mlx.scheme_of(config, dtype)
    method = str(config.get("quant_method") or ("modelopt" if key == BESIDE else "compressed-tensors"))
    if method in ("fp8", "mxfp8"):
        return fp8_blocks.scheme_of(config if method == "fp8" else {"weight_block_size": (1, 32), **config}, dtype)
    if method == "compressed-tensors":
        return compressed_tensors.scheme_of(config)
    if method.startswith("modelopt"):
        return modelopt.scheme_of(config, dtype)
    if method == "gptq":
        return gptq.scheme_of(config)
    if method == "awq":
        return awq.scheme_of(config)
    if method == "bitsandbytes":
        return bitsandbytes.BitsAndBytes(dtype)
    if method == "torchao":
        return torchao.TorchAo(dtype)
    if method == "mxfp4":
        return mxfp4_experts.Mxfp4Experts()
    raise ConfigError(f"{key}.quant_method={method!r} is not supported; it can be {', '.join(METHODS)}")


def _settings(external: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The settings of quantization, and where they stand. Of a model of text and images those of the text count too."""
    for place in (external, external.get("text_config")):
        settings = place if isinstance(place, Mapping) else {}
        for key in QUANTIZATION_KEYS:
            if isinstance(settings.get(key), Mapping):
                return settings[key], key
    beside = external.get(BESIDE)
    return (beside, BESIDE) if isinstance(beside, Mapping) else (None, "")


def _plain_dtype(external: Mapping[str, Any]) -> torch.dtype:
    text = external.get("text_config")
    places = (external, text if isinstance(text, Mapping) else {})
    named = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), "bfloat16")
    return DTYPES.get(str(named).removeprefix("torch."), torch.bfloat16)
