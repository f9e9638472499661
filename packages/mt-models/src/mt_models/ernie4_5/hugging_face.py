"""ERNIE 4.5 in Hugging Face's format: dense models, and those with experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule
from mt_models.blocks.hugging_face_decoder import (
    PRE_NORMS,
    ROPE_KEYS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    feed_forward_rules,
    import_rope,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import (
    MOE_IGNORED,
    ExpertNames,
    export_balance,
    import_balance,
    mixed_feed_forward_rules,
    shared_experts,
)
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.ernie4_5.config import Ernie45Config
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output

DENSE, EXPERTS = "ernie4_5", "ernie4_5_moe"
DROPOUT = "attention_dropout"
NAMES = ExpertNames(expert_bias="mlp.moe_statics.e_score_correction_bias")
PREDICTING = frozenset(f"model.mtp_{part}.*" for part in ("block", "emb_norm", "hidden_norm", "linear_proj"))
"""Tensors of the layer that predicts a further token, which the class leaves out."""


# -- tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AsOneRow(Rule):
    """[experts] here, [1, experts] there."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].flatten()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor[None]]


def name_map(config: Ernie45Config) -> NameMap:
    bias = config.use_bias
    layer = [
        *norm_rules(PRE_NORMS),
        *attention_rules(config, qkv_bias=bias, output_bias=bias),
        *(feed_forward_rules(bias=bias) if config.moe is None else _mixed_rules(config)),
    ]
    names = decoder_name_map(config, layer)
    return names if config.moe is None else NameMap(names.rules, 0, names.ignored | PREDICTING)


def _mixed_rules(config: Ernie45Config) -> list[Rule]:
    rules = mixed_feed_forward_rules(config, NAMES)
    return [AsOneRow(rule.ours, rule.theirs) if rule.ours.endswith("expert_bias") else rule for rule in rules]


# -- configuration: dense ------------------------------------------------------------------------------


def model_type_of(config: Ernie45Config) -> str:
    return DENSE if config.moe is None else EXPERTS


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    return import_rope(external, default_base=500000.0)


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Ernie45Config.model_validate(model)
    require_value(config, "attention_dropout", (0.0,), model_type_of(config))
    return {**export_shape(config), **export_rope(config)}


FIELDS = (
    *(field for field in decoder_fields(tied=True, epsilon=1e-5, positions=131072) if field.theirs != DROPOUT),
    Field("num_key_value_heads", "num_query_groups", default=2),
    Field("head_dim", "kv_channels", default=128),
    Field("use_bias", "use_bias", bool, default=False),
)
ACTIVATION = Fixed("hidden_act", ("silu", "swish"))
NOT_READ = {**IGNORED, DROPOUT: "the class sets it to 0"}
ERNIE45 = ConfigMap(
    architecture=DENSE,
    fields=FIELDS,
    fixed=(ACTIVATION, *NOT_A_CHOICE),
    ignored=NOT_READ,
    import_extra=import_extra,
    import_extra_keys=ROPE_KEYS,
    export_extra=export_extra,
)


# -- configuration: with experts ---------------------------------------------------------------------

START, END, INTERVAL = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
COUNT, TOPK, SHARED, WIDTH = "moe_num_experts", "moe_k", "moe_num_shared_experts", "moe_intermediate_size"


def import_with_experts(external: Mapping[str, Any]) -> dict[str, Any]:
    layers = import_layers(external)
    moe = {"moe": import_moe(external, layers)} if any(layers) else {}
    return {**import_extra(external), **moe}


def import_moe(external: Mapping[str, Any], layers: list[bool]) -> dict[str, Any]:
    width, shared = external.get(WIDTH, 1536), external.get(SHARED, 2)
    return {
        "num_experts": external.get(COUNT, 64),
        "moe_router_topk": external.get(TOPK, 6),
        "moe_router_enable_expert_bias": True,
        "moe_router_weight_in_fp32": True,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": frequency_of(layers),
        **({"moe_shared_expert_intermediate_size": width * shared} if shared > 0 else {}),
        **import_balance(external, default=0.001),
    }


def import_layers(external: Mapping[str, Any]) -> list[bool]:
    """For each layer whether it has experts: every interval-th one from the start to the end, both included."""
    layers = external.get("num_hidden_layers", 28)
    start, interval = external.get(START, 1), external.get(INTERVAL, 1)
    end = external.get(END, -1)
    end = layers - 1 if end in (-1, None) else end
    return [(layer + 1) % interval == 0 and start <= layer <= end for layer in range(layers)]


def export_layers(moe: MoEOptions) -> dict[str, int]:
    """Raises ConfigError for layers that no start, end and interval say."""
    sparse = [layer for layer, has_experts in enumerate(moe.layers) if has_experts]
    if sparse:
        interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
        said = {START: sparse[0], END: sparse[-1], INTERVAL: interval}
        if import_layers({"num_hidden_layers": len(moe.layers), **said}) == moe.layers:
            return said
    raise ConfigError(
        f"model.moe.moe_layer_freq={moe['moe_layer_freq']} cannot be written as a Hugging Face {EXPERTS}, whose layers "
        "with experts are those with numbers, counted from 1, divisible by an interval, between a first and a last one"
    )


EXPRESSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size"), ANY
    ),
    "moe_router_enable_expert_bias": (True,),
}


def export_with_experts(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Ernie45Config.model_validate(model)
    moe = MoEOptions(config)
    moe.require(EXPERTS, **EXPRESSED)
    return {
        **export_extra(model),
        **export_layers(moe),
        **export_balance(moe),
        COUNT: moe.num_experts,
        TOPK: moe.topk,
        WIDTH: moe.ffn_size,
        SHARED: 0 if moe.shared_size is None else shared_experts(moe, EXPERTS),
        "num_nextn_predict_layers": 0,
    }


ERNIE45_MOE = ConfigMap(
    architecture=EXPERTS,
    fields=(
        *(field for field in FIELDS if field.theirs not in ("num_key_value_heads", "head_dim", "use_bias")),
        Field("num_key_value_heads", "num_query_groups", default=4),
        Field("head_dim", "kv_channels"),
    ),
    fixed=(
        ACTIVATION,
        # Biases of attention, of shared experts and of the LM head, and none of experts.
        Fixed("use_bias", (False, None)),
        Fixed("moe_norm_min", (1e-12,)),
        Fixed("moe_gate", ("topk",), written=False),
        Fixed("moe_gate_act", ("softmax", None), written=False),
        Fixed("moe_use_aux_free", (True,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **NOT_READ,
        **MOE_IGNORED,
        "moe_capacity": "of the code that trained the model; the class drops no token",
        "num_nextn_predict_layers": "of a layer that predicts a further token, which the class leaves out",
    },
    import_extra=import_with_experts,
    import_extra_keys=(*ROPE_KEYS, START, END, INTERVAL, COUNT, TOPK, SHARED, WIDTH, "router_aux_loss_coef"),
    export_extra=export_with_experts,
    spellings={"num_experts": COUNT, "num_experts_per_tok": TOPK},
)

HUGGING_FACE = HuggingFaceFamily(
    family="ernie4_5",
    model_types={DENSE: ERNIE45, EXPERTS: ERNIE45_MOE},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    architectures={DENSE: "Ernie4_5ForCausalLM", EXPERTS: "Ernie4_5_MoeForCausalLM"},
)
