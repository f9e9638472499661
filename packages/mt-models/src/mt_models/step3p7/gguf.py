"""The decoder of Step-3.5 and Step-3.7 in GGUF: llama.cpp's step35."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    FREQUENCIES,
    PRE_NORMS,
    QK_NORMS,
    SIGMOID,
    attention,
    decoder_map,
    experts,
    feed_forward,
    llama3_factors,
    norms,
)
from mt_models.blocks.hugging_face_decoder import FULL, SLIDING
from mt_models.blocks.hugging_face_moe import BIAS_KEY
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, PlusOne, require
from mt_models.step3p7.config import Step3p7Config
from mt_models.step3p7.hugging_face import (
    EXPERT_LAYERS,
    KIND,
    LIMITS,
    PREDICTED_LAYERS,
    TEXT_KIND,
    WINDOW_HEADS,
)

NAME = "step35"


# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: Step3p7Config) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in _layer(config, number)]
    # Layers of multi-token prediction follow the others; the family does not have them.
    unread = [f"blk.{config.num_layers + depth}.*" for depth in range(PREDICTED_LAYERS)]
    return decoder_map(config, layers, norm_rule=PlusOne, ignored=unread)


def _layer(config: Step3p7Config, number: int) -> list[Rule]:
    second = experts(MoEOptions(config)) if config.layers_with_experts[number] else feed_forward()
    rules = [
        *norms({**PRE_NORMS, **QK_NORMS}, rule=PlusOne),
        *attention(config.of_layer(number)),
        *norms({"self_attention.linear_gate": "attn_gate"}),
        *second,
    ]
    return [rule.for_layer(number) for rule in rules]


# -- configuration -----------------------------------------------------------------------------------

HEADS, GROUPS, PATTERN = "attention.head_count", "attention.head_count_kv", "attention.sliding_window_pattern"
CLAMPS = {"expert_swiglu_limits": "swiglu_clamp_exp", "shared_expert_swiglu_limits": "swiglu_clamp_shexp"}
SHARES = {FULL: 0.5, SLIDING: 1.0}
"""Share of each head that is rotated; llama.cpp has them fixed."""
KEYS = (
    *(key for key in DENSE if key.theirs not in ("block_count", HEADS)),
    Key("attention.key_length", "head_dim"),
    Key("attention.sliding_window", "sliding_window"),
    Key("expert_count", "n_routed_experts"),
    *EXPERT_COUNTS,
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_feed_forward_length", "share_expert_dim"),
)
"""Keys of `text_config`."""


def read(metadata: Metadata) -> dict[str, Any]:
    layers = metadata.need("block_count", int) - (metadata.get("nextn_predict_layers", int) or 0)
    windows, heads = metadata.flags(PATTERN)[:layers], metadata.numbers(HEADS)[:layers]
    by_kind = dict(zip(windows, heads, strict=True))
    whole = by_kind.get(False, heads[0])
    sparse = [metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(layers)]
    text: dict[str, Any] = {key.ours: metadata.need(key.theirs, key.kind) for key in KEYS}
    text |= {
        "model_type": TEXT_KIND,
        "num_hidden_layers": layers,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "num_attention_heads": whole,
        WINDOW_HEADS: by_kind.get(True, whole),
        "num_key_value_heads": metadata.numbers(GROUPS)[0],
        "layer_types": [SLIDING if window else FULL for window in windows],
        EXPERT_LAYERS: ["sparse" if there else "dense" for there in sparse],
        "moe_router_scaling_factor": metadata.get("expert_weights_scale", float) or 1.0,
        "norm_expert_weight": bool(metadata.get("expert_weights_norm", bool)),
        "rope_parameters": _read_positions(metadata, text["head_dim"], windows),
        **{LIMITS[ours]: metadata.decimals(theirs)[:layers] or None for ours, theirs in CLAMPS.items()},
    }
    return {"text_config": text}


def _read_positions(metadata: Metadata, head_dim: int, windows: list[bool]) -> dict[str, Any]:
    base = metadata.get("rope.freq_base", float) or 10000.0
    whole: dict[str, Any] = {"rope_type": "default"}
    if metadata.has_tensor(FREQUENCIES):
        whole = _read_scaling(metadata.tensor(FREQUENCIES), base, int(head_dim * SHARES[FULL]))
    bases = {FULL: base, SLIDING: metadata.get("rope.freq_base_swa", float) or 10000.0}
    scalings = {FULL: whole, SLIDING: {"rope_type": "default"}}
    kinds = [kind for kind, window in ((FULL, False), (SLIDING, True)) if window in windows]
    return {
        kind: {**scalings[kind], "rope_theta": bases[kind], "partial_rotary_factor": SHARES[kind]} for kind in kinds
    }


def _read_scaling(factors: Tensor, base: float, rotated: int) -> dict[str, Any]:
    """Llama 3's scaling of which these are the factors. Raises ConfigError unless published parameters give them."""
    factors = factors[: rotated // 2]
    for high in (32.0, 4.0):
        for original in (131072, *(2**exponent for exponent in range(13, 4, -1))):
            scaling = {
                "rope_type": "llama3",
                "factor": float(factors.max()),
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
            if torch.allclose(llama3_factors(scaling, base, rotated), factors, rtol=1e-4):
                return scaling
    raise ConfigError(f"{FREQUENCIES} holds factors that are not those of Llama 3 with a factor of {factors.max():g}")


def write(external: External) -> dict[str, Any]:
    text: Mapping[str, Any] = external["text_config"]
    positions = text["rope_parameters"]
    _require_expressed(text, positions)
    windows = [kind == SLIDING for kind in text["layer_types"]]
    heads = (text["num_attention_heads"], text[WINDOW_HEADS])
    values = {
        **{key.theirs: key.kind(text[key.ours]) for key in KEYS},
        "block_count": text["num_hidden_layers"],
        "vocab_size": text["vocab_size"],
        HEADS: [heads[window] for window in windows],
        GROUPS: [text["num_key_value_heads"]] * len(windows),
        PATTERN: windows,
        "attention.value_length": text["head_dim"],
        "rope.dimension_count": text["head_dim"],
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": True,
        "expert_weights_scale": float(text["moe_router_scaling_factor"]),
    }
    for kind, key in ((FULL, "rope.freq_base"), (SLIDING, "rope.freq_base_swa")):
        if kind in positions:
            values[key] = float(positions[kind]["rope_theta"])
    for ours, theirs in CLAMPS.items():
        if (limits := text.get(LIMITS[ours])) is not None:
            values[theirs] = [float(limit) for limit in limits]
    return values


def _require_expressed(text: Mapping[str, Any], positions: Mapping[str, Any]) -> None:
    if "sparse" not in text[EXPERT_LAYERS]:
        raise ConfigError(f"model.moe=null cannot be written as GGUF of the architecture {NAME}, which has experts")
    require(text, "attention_bias", (False,), NAME)
    require(text, "tie_word_embeddings", (False,), NAME)
    require(text, BIAS_KEY, (True, None), NAME)
    for kind, table in positions.items():
        require(table, "partial_rotary_factor", (SHARES[kind],), f"{NAME} in layers of {kind}")
        require(table, "rope_type", ("default", "llama3"), NAME)


def frequency_factors(external: External) -> Mapping[str, Tensor]:
    """`further`: the factors of Llama 3's scaling of layers without a window, and 1 for what they do not rotate."""
    text = external["text_config"]
    table = text["rope_parameters"].get(FULL, {})
    if table.get("rope_type") != "llama3":
        return {}
    scaled = llama3_factors(table, float(table["rope_theta"]), int(text["head_dim"] * SHARES[FULL]))
    return {FREQUENCIES: torch.cat([scaled, torch.ones(text["head_dim"] // 2 - len(scaled))])}


STEP35 = GGUFArchitecture(name=NAME, model_type=KIND, keys=(), read=read, write=write, further=frequency_factors)

GGUF = GGUFFamily(family=KIND, architectures=(STEP35,), name_map=name_map)
