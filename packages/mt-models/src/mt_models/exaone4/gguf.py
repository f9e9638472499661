"""EXAONE 4 and K-EXAONE in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    BRANCH_NORMS,
    DENSE,
    EXPERT_COUNTS,
    PRE_NORMS,
    QK_NORMS,
    SIGMOID,
    attention,
    decoder_map,
    feed_forward,
    frequency_factors,
    mixed_feed_forward,
    norms,
    read_shape,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.blocks.hugging_face_decoder import FULL, OURS, SLIDING
from mt_models.blocks.hugging_face_moe import BIAS_KEY, renamed
from mt_models.exaone4.config import Exaone4Config
from mt_models.exaone4.hugging_face import COUNT, DENSE_LAYERS, EXPERTS, KINDS
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LAYERS, PERIOD = 64, 4
"""llama.cpp has windows in models of so many layers alone, and one layer without in every PERIOD."""


def name_map(config: Exaone4Config) -> NameMap:
    heads = [*norms(QK_NORMS), *attention(config)]
    if config.moe is None:
        return decoder_map(config, [*norms(BRANCH_NORMS), *heads, *feed_forward()])
    layer = [*norms(PRE_NORMS), *heads, *mixed_feed_forward(config)]
    return decoder_map(config, [*layer, *(_prediction_rules(config, heads) if config.mtp_num_layers else ())])


def _prediction_rules(config: Exaone4Config, heads: list[Rule]) -> list[Rule]:
    """The layer of multi-token prediction follows the others."""
    number, prefix = config.num_layers, "mtp.layers.0."
    layer = [rule.for_layer(number) for rule in (*norms(PRE_NORMS), *heads, *feed_forward())]
    return [
        *(Same(f"{prefix}{ours}.weight", f"blk.{number}.nextn.{theirs}.weight") for ours, theirs in PREDICTION.items()),
        *(renamed(rule, OURS.replace("{i}", str(number)), f"{prefix}mtp_model_layer.") for rule in layer),
    ]


def read(metadata: Metadata) -> dict[str, Any]:
    layers, window = metadata.need("block_count", int), metadata.get(WINDOW, int)
    windows = {"sliding_window": window, "sliding_window_pattern": PERIOD} if window and layers == LAYERS else {}
    return {**read_shape(metadata), "sliding_window": None, **windows}


def write(external: External) -> dict[str, Any]:
    require(external, "head_dim", (external["hidden_size"] // external["num_attention_heads"],), "exaone4")
    values, window = write_shape(external), external.get("sliding_window")
    if window is None:
        return values
    require(external, "num_hidden_layers", (LAYERS,), "exaone4 with a sliding_window")
    kinds = list(external["layer_types"])
    require(external, "layer_types", ([SLIDING if (i + 1) % PERIOD else FULL for i in range(LAYERS)],), "exaone4")
    return {**values, WINDOW: window, PATTERN: [kind == SLIDING for kind in kinds]}


EXAONE4 = GGUFArchitecture(
    name="exaone4", model_type="exaone4", keys=DENSE, read=read, write=write, further=frequency_factors
)


# -- K-EXAONE ----------------------------------------------------------------------------------------

NAME, PREDICTING = "exaone-moe", "nextn_predict_layers"
PREDICTION = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head_norm"}


def read_with_experts(metadata: Metadata) -> dict[str, Any]:
    predicted = metadata.get(PREDICTING, int) or 0
    return {
        **read_shape(metadata),
        "num_hidden_layers": metadata.need("block_count", int) - predicted,
        COUNT: predicted,
        "sliding_window": metadata.need(WINDOW, int),
        "sliding_window_pattern": PERIOD,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", bool)),
    }


def write_with_experts(external: External) -> dict[str, Any]:
    layers, dense, predicted = external["num_hidden_layers"], external[DENSE_LAYERS], external[COUNT]
    kinds = [SLIDING if (layer + 1) % PERIOD else FULL for layer in range(layers)]
    require({**external, "layer_types": list(external["layer_types"])}, "layer_types", (kinds,), NAME)
    require(external, KINDS, (["dense"] * dense + ["sparse"] * (layers - dense),), NAME)
    require(external, BIAS_KEY, (True, None), NAME)
    require(external, "n_group", (1, None), NAME)
    require(external, "norm_topk_prob", (True,), NAME)
    require_scaling(external, ("default",), NAME)
    return {
        **write_shape(external),
        WINDOW: external["sliding_window"],
        "block_count": layers + predicted,
        PATTERN: [kind == SLIDING for kind in kinds] + [False] * predicted,
        "expert_shared_feed_forward_length": external["num_shared_experts"] * external["moe_intermediate_size"],
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": True,
        PREDICTING: predicted,
    }


EXAONE_MOE = GGUFArchitecture(
    name=NAME,
    model_type=EXPERTS,
    keys=(
        *DENSE,
        Key("expert_count", "num_experts"),
        *EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_count", "num_shared_experts"),
        Key("leading_dense_block_count", DENSE_LAYERS),
        Key("expert_weights_scale", "routed_scaling_factor", float, 1.0),
    ),
    read=read_with_experts,
    write=write_with_experts,
)

GGUF = GGUFFamily(family="exaone4", architectures=(EXAONE4, EXAONE_MOE), name_map=name_map, copies=tied_output)
