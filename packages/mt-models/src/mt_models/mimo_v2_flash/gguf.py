"""MiMo-V2-Flash in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    OURS,
    PRE_NORMS,
    SIGMOID,
    THEIRS,
    decoder_map,
    feed_forward,
    mixed_feed_forward,
    norms,
)
from mt_models.blocks.hugging_face_decoder import FULL, SLIDING
from mt_models.blocks.hugging_face_grouped_rows import GroupedRows
from mt_models.blocks.hugging_face_moe import BIAS_KEY, renamed
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.mimo_v2_flash.config import MiMoV2FlashConfig
from mt_models.mimo_v2_flash.hugging_face import BASES, KIND, PREDICTED, SHARE, SINKS

NAME = "mimo2"


# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: MiMoV2FlashConfig) -> NameMap:
    heads = [rule for number in range(config.num_layers) for rule in _attention(config, number)]
    predicted = [rule for depth in range(config.mtp_num_layers) for rule in _prediction_rules(config, depth)]
    return decoder_map(config, [*norms(PRE_NORMS), *heads, *mixed_feed_forward(config), *predicted])


def _attention(config: MiMoV2FlashConfig, number: int) -> list[Rule]:
    groups = config.of_layer(number).query_groups
    rules: list[Rule] = [
        GroupedRows(
            f"{OURS}self_attention.linear_qkv.weight",
            tuple(f"{THEIRS}attn_{part}.weight" for part in "qkv"),
            groups=groups,
            rows=(config.num_attention_heads // groups * config.head_dim, config.head_dim, config.v_head_dim),
        ),
        *norms({"self_attention.linear_proj": "attn_output"}),
    ]
    if config.has_window(number):
        rules.append(Same(f"{OURS}{SINKS}", f"{THEIRS}attn_sinks.weight"))
    return [rule.for_layer(number) for rule in rules]


PREDICTION = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head_norm"}


def _prediction_rules(config: MiMoV2FlashConfig, depth: int) -> list[Rule]:
    """Layers of multi-token prediction follow the others."""
    number, own = config.num_layers + depth, f"mtp.layers.{depth}."
    plain = [rule.for_layer(number) for rule in (*norms(PRE_NORMS), *feed_forward())]
    layer = OURS.replace("{i}", str(number))
    return [
        *(Same(f"{own}{ours}.weight", f"blk.{number}.nextn.{name}.weight") for ours, name in PREDICTION.items()),
        *(renamed(rule, layer, f"{own}mtp_model_layer.") for rule in (*plain, *_attention(config, number))),
    ]


# -- configuration -----------------------------------------------------------------------------------

GROUPS, PATTERN, ROTATED = "attention.head_count_kv", "attention.sliding_window_pattern", "rope.dimension_count"
BASE, LOCAL_BASE, PREDICTING = "rope.freq_base", "rope.freq_base_swa", "nextn_predict_layers"


def read(metadata: Metadata) -> dict[str, Any]:
    predicted = metadata.get(PREDICTING, int) or 0
    layers = metadata.need("block_count", int) - predicted
    groups, windows = metadata.numbers(GROUPS), metadata.numbers(PATTERN)[:layers]
    return {
        "num_hidden_layers": layers,
        PREDICTED: predicted,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "num_key_value_heads": groups[windows.index(0)] if 0 in windows else groups[0] // 2,
        "layer_types": [SLIDING if window else FULL for window in windows],
        "mlp_layer_types": [
            "sparse" if metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") else "dense" for layer in range(layers)
        ],
        "rope_parameters": _read_positions(metadata),
    }


def _read_positions(metadata: Metadata) -> dict[str, Any]:
    head, rotated = metadata.need("attention.key_length", int), metadata.need(ROTATED, int)
    # The share that published configurations say, where it rotates as many channels.
    share = SHARE if int(head * SHARE) == rotated else rotated / head
    bases = {FULL: metadata.get(BASE, float), SLIDING: metadata.get(LOCAL_BASE, float)}
    return {
        kind: {"rope_type": "default", "rope_theta": base or BASES[kind], "partial_rotary_factor": share}
        for kind, base in bases.items()
    }


def write(external: External) -> dict[str, Any]:
    _require_expressed(external)
    predicted, positions = int(external.get(PREDICTED) or 0), external["rope_parameters"]
    windows = [int(kind == SLIDING) for kind in external["layer_types"]] + [1] * predicted
    head, groups = external["head_dim"], external["num_key_value_heads"]
    values = {
        "block_count": external["num_hidden_layers"] + predicted,
        "vocab_size": external["vocab_size"],
        GROUPS: [2 * groups if window else groups for window in windows],
        PATTERN: windows,
        "attention.sliding_window": external["sliding_window_size"] + 1,
        ROTATED: int(head * positions[FULL]["partial_rotary_factor"]),
        BASE: float(positions[FULL]["rope_theta"]),
        LOCAL_BASE: float(positions[SLIDING]["rope_theta"]),
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": True,
    }
    # Without the key a file has no such layers.
    return {**values, PREDICTING: predicted} if predicted else values


def _require_expressed(external: External) -> None:
    if "sparse" not in external["mlp_layer_types"]:
        raise ConfigError(f"model.moe=null cannot be written as GGUF of the architecture {NAME}, which has experts")
    require(external, "attention_bias", (False,), NAME)
    require(external, "tie_word_embeddings", (False,), NAME)
    require(external, BIAS_KEY, (True, None), NAME)
    require(external, "n_group", (1, None), NAME)
    require(external, "norm_topk_prob", (True,), NAME)
    require(external, "routed_scaling_factor", (1.0, None), NAME)


MIMO2 = GGUFArchitecture(
    name=NAME,
    model_type=KIND,
    keys=(
        *DENSE,
        Key("attention.key_length", "head_dim"),
        Key("attention.value_length", "v_head_dim"),
        Key("attention.value_scale", "attention_value_scale", float, 1.0),
        Key("attention.sliding_window", "sliding_window"),
        Key("expert_count", "n_routed_experts"),
        *EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family=KIND, architectures=(MIMO2,), name_map=name_map)
