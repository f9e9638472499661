"""Which tensor is written in which type, under the name of a mixture: llama.cpp's choices (`llama-quant.cpp`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.gguf.block_types import BY_NAME, BlockType
from mt_core.errors import ConfigError


@dataclass(frozen=True)
class Mixture:
    """base: the type of what no rule names. file_type: `general.file_type`. output: of the LM head."""

    base: str
    file_type: int
    output: str | None = None


MIXTURES: Mapping[str, Mixture] = {
    "F32": Mixture("F32", 0),
    "F16": Mixture("F16", 1),
    "BF16": Mixture("BF16", 32),
    "Q4_0": Mixture("Q4_0", 2, "Q6_K"),
    "Q4_1": Mixture("Q4_1", 3, "Q6_K"),
    "Q5_0": Mixture("Q5_0", 8, "Q6_K"),
    "Q5_1": Mixture("Q5_1", 9, "Q6_K"),
    "Q8_0": Mixture("Q8_0", 7),
    "Q4_K_S": Mixture("Q4_K", 14, "Q6_K"),
    "Q4_K_M": Mixture("Q4_K", 15, "Q6_K"),
    "Q5_K_S": Mixture("Q5_K", 16, "Q6_K"),
    "Q5_K_M": Mixture("Q5_K", 17, "Q6_K"),
    "Q6_K": Mixture("Q6_K", 18, "Q6_K"),
    "IQ4_NL": Mixture("IQ4_NL", 25, "Q6_K"),
    "IQ4_XS": Mixture("IQ4_XS", 30, "Q6_K"),
    # Experts alone; the rest as Q8_0.
    "MXFP4": Mixture("Q8_0", 38, "Q8_0"),
}
OF_DTYPE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""For rows that are no whole blocks of 256."""
IN_FP32 = re.compile(
    r".*_norm\.(weight|bias)|.*\.ffn_gate_inp(_shexp)?\.weight|position_embd\.weight|token_types\.weight"
    r"|.*\.indexer\.[qk]_proj\.weight|.*compressor_ape\.weight"
    r"|.*\.(ssm_conv1d(_[qkv])?|shortconv\.conv|time_mix_([wavg][12]|lerp_fused))\.weight|.*\.attn_rel_b\.weight|.*\.ssm_(a|d)|.*\.attn_sinks\.weight"
)
"""Matrices and stacked vectors that are never quantized."""


@dataclass(frozen=True)
class Model:
    """What the choices depend on. layers: their number. groups: query heads for each key-value head."""

    layers: int
    experts: int
    groups: int
    has_importance: bool = False


def require_mixture(name: str) -> Mixture:
    if name not in MIXTURES:
        raise ConfigError(f"--quantize {name} is not a type of GGUF that is written; it can be {', '.join(MIXTURES)}")
    return MIXTURES[name]


def types_of(infos: Mapping[str, TensorInfo], mixture: str | None, model: Model) -> dict[str, BlockType]:
    """mixture None: matrices in the dtype in which they are."""
    if mixture is not None:
        require_mixture(mixture)
    values = sorted((name for name in infos if re.search(r"\.attn_(v|qkv|kv_b)\.weight$", name)), key=_layer)
    order = {name: (number, len(values)) for number, name in enumerate(values)}
    tied = "output.weight" not in infos
    return {name: BY_NAME[_type_of(name, info, mixture, model, order, tied)] for name, info in infos.items()}


def _layer(name: str) -> int:
    match = re.match(r"(?:enc\.|dec\.)?blk\.(\d+)\.", name)
    return int(match[1]) if match else 0


def _type_of(
    name: str, info: TensorInfo, mixture: str | None, model: Model, order: Mapping[str, tuple[int, int]], tied: bool
) -> str:
    if info.dtype == torch.int32:
        return "I32"
    if len(info.shape) < 2 or IN_FP32.fullmatch(name) or not name.endswith(".weight"):
        return "F32"
    if mixture is None:
        return OF_DTYPE.get(info.dtype, "F32")
    return fitting(_chosen(name, mixture, info.shape, model, order, tied), info.shape[-1])


def fitting(kind: str, width: int) -> str:
    """The type, or the one that stands in for it where rows of this width are no whole blocks."""
    if width % BY_NAME[kind].elements == 0:
        return kind
    other = FALLBACKS.get(kind, "F16")
    return other if width % BY_NAME[other].elements == 0 else "F16"


def _chosen(
    name: str,
    mixture: str,
    shape: Sequence[int],
    model: Model,
    order: Mapping[str, tuple[int, int]],
    tied: bool,
) -> str:
    chosen = MIXTURES[mixture]
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        if chosen.output == "Q6_K" and shape[-1] % 256:
            return "Q8_0"
        return chosen.output or chosen.base
    if mixture == "MXFP4":
        return "MXFP4" if len(shape) == 3 else "Q8_0"
    if chosen.output is None:
        return chosen.base
    part = name.removesuffix(".weight").rpartition(".")[2]
    rule = RULES.get(part.removesuffix("_exps"))
    return (rule(mixture, name, model, order) if rule else None) or chosen.base


Order = Mapping[str, tuple[int, int]]
Rule = Callable[[str, str, Model, Order], "str | None"]


def gets_more_bits(number: int, count: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    return number < count // 8 or number >= 7 * count // 8 or (number - count // 8) % 3 == 2


def _value(mixture: str, name: str, model: Model, order: Order) -> str | None:
    number, count = order[name]
    kind = None
    if mixture in ("IQ4_NL", "IQ4_XS") and model.groups >= 4:
        kind = "Q5_K"
    elif mixture in ("Q4_K_M", "Q5_K_M") and gets_more_bits(number, count):
        kind = "Q6_K"
    elif mixture == "Q4_K_S" and number < 4:
        kind = "Q5_K"
    # As many values are shared by eight experts: they cost little.
    return "Q8_0" if model.experts == 8 else kind


def _key(mixture: str, name: str, model: Model, order: Order) -> str | None:
    return "Q8_0" if model.experts == 8 else None


def _down(mixture: str, name: str, model: Model, order: Order) -> str | None:
    layer, first = _layer(name), _layer(name) < model.layers // 8
    if mixture in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if gets_more_bits(layer, model.layers) else None
    if mixture == "Q4_K_S" and first:
        return "Q5_K"
    if mixture in ("IQ4_NL", "IQ4_XS") and first and not model.has_importance:
        return "Q5_K"
    if mixture in ("Q4_0", "Q5_0") and first and model.has_importance:
        return "Q4_1" if mixture == "Q4_0" else "Q5_1"
    return None


def _attention_output(mixture: str, name: str, model: Model, order: Order) -> str | None:
    return "Q5_K" if model.experts == 8 and mixture in ("Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS") else None


def _fused(mixture: str, name: str, model: Model, order: Order) -> str | None:
    return {"Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}.get(mixture)


RULES: Mapping[str, Rule] = {
    "attn_v": _value,
    "attn_kv_b": _value,
    "attn_k": _key,
    "attn_output": _attention_output,
    "attn_qkv": _fused,
    "ffn_down": _down,
}
