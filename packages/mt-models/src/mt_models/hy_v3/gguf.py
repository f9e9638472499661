"""Hy3 in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    OURS,
    PRE_NORMS,
    QK_NORMS,
    SIGMOID,
    THEIRS,
    attention,
    decoder_map,
    experts,
    feed_forward,
    norms,
    read_shape,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.blocks.hugging_face_moe import BIAS_KEY, renamed
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.hy_v3.config import HyV3Config
from mt_models.hy_v3.hugging_face import KIND, KINDS

PREDICTED, PREDICTING = "num_nextn_predict_layers", "nextn_predict_layers"
UNREAD = [f"blk.*.nextn.{part}.weight" for part in ("embed_tokens", "shared_head_head")]
"""Within layers of multi-token prediction, in whose place those of the model are taken."""


# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: HyV3Config) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in _layer(config, number)]
    predicted = [rule for depth in range(config.mtp_num_layers) for rule in _prediction_rules(config, depth)]
    return decoder_map(config, [*layers, *predicted], ignored=UNREAD)


def _layer(config: HyV3Config, number: int) -> list[Rule]:
    moe = MoEOptions(config)
    second = _experts(moe) if moe.layers[number] else feed_forward()
    rules = (*norms({**PRE_NORMS, **QK_NORMS}), *attention(config), *second)
    return [rule.for_layer(number) for rule in rules]


def _experts(moe: MoEOptions) -> list[Rule]:
    """The bias of a router has a name of its own here."""
    usual = f"{THEIRS}exp_probs_b.bias"
    return [
        Same(rule.ours, usual.removesuffix(".bias"), others=(rule,)) if usual in rule.sources else rule
        for rule in experts(moe)
    ]


PREDICTION = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head_norm"}


def _prediction_rules(config: HyV3Config, depth: int) -> list[Rule]:
    """Layers of multi-token prediction follow the others."""
    number, own = config.num_layers + depth, f"mtp.layers.{depth}."
    layer = OURS.replace("{i}", str(number))
    return [
        *(Same(f"{own}{ours}.weight", f"blk.{number}.nextn.{name}.weight") for ours, name in PREDICTION.items()),
        *(renamed(rule, layer, f"{own}mtp_model_layer.") for rule in _layer(config.with_predicted_layers(), number)),
    ]


# -- configuration -----------------------------------------------------------------------------------

WIDTH, SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"


def read(metadata: Metadata) -> dict[str, Any]:
    predicted = metadata.get(PREDICTING, int) or 0
    layers, width = metadata.need("block_count", int) - predicted, metadata.need(WIDTH, int)
    return {
        **read_shape(metadata),
        "num_hidden_layers": layers,
        PREDICTED: predicted,
        "num_shared_experts": (metadata.get(SHARED_WIDTH, int) or width) // width,
        "route_norm": bool(metadata.get("expert_weights_norm", bool)),
        KINDS: [
            "sparse" if metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") else "dense" for layer in range(layers)
        ],
    }


def write(external: External) -> dict[str, Any]:
    require(external, "attention_bias", (False,), KIND)
    require(external, BIAS_KEY, (True, None), KIND)
    require_scaling(external, ("default", "linear", "yarn"), KIND)
    predicted = int(external.get(PREDICTED) or 0)
    values = {
        **write_shape(external),
        "block_count": external["num_hidden_layers"] + predicted,
        SHARED_WIDTH: external["num_shared_experts"] * external["moe_intermediate_size"],
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": True,
    }
    # Without the key a file has no such layers.
    return {**values, PREDICTING: predicted} if predicted else values


HY_V3 = GGUFArchitecture(
    name="hy_v3",
    model_type=KIND,
    keys=(
        *DENSE,
        Key("expert_count", "num_experts"),
        *EXPERT_COUNTS,
        Key(WIDTH, "moe_intermediate_size"),
        Key("expert_weights_scale", "router_scaling_factor", float, 1.0),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family=KIND, architectures=(HY_V3,), name_map=name_map, copies=tied_output)
