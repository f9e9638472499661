"""Gemma 2 and 3 (text) in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.errors import ConfigError
from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    attention,
    decoder_map,
    feed_forward,
    head_size,
    norms,
    read_shape,
    tied_output,
    write_shape,
)
from mt_models.blocks.hugging_face_decoder import FULL, SLIDING
from mt_models.gemma.config import GemmaConfig
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, PlusOne, require

NORMS = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
QK_NORMS = {"self_attention.q_layernorm": "attn_q_norm", "self_attention.k_layernorm": "attn_k_norm"}
FINAL = {"decoder.final_layernorm": "output_norm"}
WINDOW = Key("attention.sliding_window", "sliding_window")
FINAL_CAP = Key("final_logit_softcapping", "final_logit_softcapping", float)
PERIODS = {"gemma2": 2, "gemma3": 6}
"""Every so many layers one attends to all positions; llama.cpp has it fixed."""


def name_map(config: GemmaConfig) -> NameMap:
    # Norms are stored with one added.
    layer = [
        *norms(NORMS, rule=PlusOne),
        *(norms(QK_NORMS, rule=PlusOne) if config.qk_layernorm else ()),
        *attention(config),
        *feed_forward(),
    ]
    plain = decoder_map(config, layer)
    final = norms(FINAL, ours="", theirs="", rule=PlusOne)
    rules = [*(rule for rule in plain.rules if not rule.ours.startswith("decoder.final_layernorm")), *final]
    return NameMap(rules, 0, plain.ignored)


def _layer_types(metadata: Metadata, period: int) -> list[str]:
    return [FULL if (i + 1) % period == 0 else SLIDING for i in range(metadata.need("block_count", int))]


def read_gemma2(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    return {
        **shape,
        "query_pre_attn_scalar": shape["head_dim"],
        "layer_types": _layer_types(metadata, PERIODS["gemma2"]),
    }


def read_gemma3(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    return {
        **shape,
        "query_pre_attn_scalar": shape["head_dim"],
        "layer_types": _layer_types(metadata, PERIODS["gemma3"]),
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": metadata.get("final_logit_softcapping", float),
    }


def write(external: External) -> dict[str, Any]:
    architecture = "gemma2" if external["model_type"] == "gemma2" else "gemma3"
    period, kinds = PERIODS[architecture], list(external["layer_types"])
    if kinds != [FULL if (i + 1) % period == 0 else SLIDING for i in range(len(kinds))]:
        raise ConfigError(
            f"layer_types={kinds} cannot be written as GGUF of the architecture {architecture}, in which every "
            f"{period}th layer attends to all positions"
        )
    # llama.cpp divides by the root of the head's size, but for the 27B models.
    require(external, "query_pre_attn_scalar", (head_size(external),), architecture)
    if architecture == "gemma3":
        require(external, "rope_local_base_freq", (10000.0,), architecture)
    return write_shape(external)


def write_gemma3(external: External) -> dict[str, Any]:
    cap = external.get("final_logit_softcapping")
    return {**write(external), **({} if cap is None else {"final_logit_softcapping": float(cap)})}


GEMMA2 = GGUFArchitecture(
    name="gemma2",
    model_type="gemma2",
    keys=(*DENSE, WINDOW, FINAL_CAP, Key("attn_logit_softcapping", "attn_logit_softcapping", float)),
    read=read_gemma2,
    write=write,
)
GEMMA3 = GGUFArchitecture(
    name="gemma3", model_type="gemma3_text", keys=(*DENSE, WINDOW), read=read_gemma3, write=write_gemma3
)

GGUF = GGUFFamily(family="gemma", architectures=(GEMMA2, GEMMA3), name_map=name_map, copies=tied_output)
