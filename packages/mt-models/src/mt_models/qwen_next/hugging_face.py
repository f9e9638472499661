"""Qwen3-Next, Qwen3.5 and Qwen3.6 in Hugging Face's format.

Files of Qwen3.5 and 3.6 hold the decoder beside an image tower: their decoder is read, under the types that have one,
and written as the type of the decoder alone (`qwen3_5_text`, `qwen3_5_moe_text`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    PRE_NORMS,
    QK_NORMS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    feed_forward_rules,
    import_rope,
    norm_rules,
    rope_table,
)
from mt_models.blocks.hugging_face_delta_net import (
    Blocks,
    ByKeyHead,
    GatedGroupedQKV,
    export_kinds,
    import_kinds,
    rows_of_key_head,
)
from mt_models.blocks.hugging_face_moe import (
    MOE_IGNORED,
    SILU,
    ExpertNames,
    expert_rules,
    export_balance,
    import_balance,
    written_packed,
)
from mt_models.blocks.hugging_face_tower import decoder_within
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output
from mt_models.qwen_next.config import QwenNextConfig

NEXT, DENSE, SPARSE = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
NAMES = ExpertNames(shared="mlp.shared_expert")


# -- tensors -----------------------------------------------------------------------------------------------


def name_map(config: QwenNextConfig) -> NameMap:
    rules = [rule for number in range(config.num_layers) for rule in _layer_rules(config, number)]
    names = decoder_name_map(config, [*rules, *(_prediction_rules(config) if config.mtp_num_layers else ())])
    # The image tower of a Qwen3.5, which this family does not have.
    return NameMap(names.rules, 0, names.ignored | {"model.visual.*"})


def _layer_rules(config: QwenNextConfig, number: int) -> list[Rule]:
    block = _delta_net_rules(config) if config.linear_layers[number] else _attention_rules(config)
    feed_forward = _feed_forward_rules(config, sparse=config.moe is not None and MoEOptions(config).layers[number])
    if config.generation != NEXT:
        feed_forward = written_packed(feed_forward)
    return [rule.for_layer(number) for rule in (*norm_rules(PRE_NORMS), *block, *feed_forward)]


def _feed_forward_rules(config: QwenNextConfig, *, sparse: bool) -> list[Rule]:
    return expert_rules(MoEOptions(config), NAMES) if sparse else feed_forward_rules()


def _attention_rules(config: QwenNextConfig) -> list[Rule]:
    qkv = tuple(f"{THEIRS}self_attn.{name}_proj.weight" for name in "qkv")
    return [
        *norm_rules(QK_NORMS),
        GatedGroupedQKV(
            f"{OURS}self_attention.linear_qkv.weight", qkv, groups=config.query_groups, heads=config.num_attention_heads
        ),
        Same(f"{OURS}self_attention.linear_proj.weight", f"{THEIRS}self_attn.o_proj.weight"),
    ]


def _delta_net_rules(config: QwenNextConfig) -> list[Rule]:
    ours, theirs = f"{OURS}self_attention.", f"{THEIRS}linear_attn."
    same = {"conv1d.weight": "conv1d.weight", "A_log": "A_log", "dt_bias": "dt_bias"}
    same |= {"out_norm.weight": "norm.weight", "out_proj.weight": "out_proj.weight"}
    rows = rows_of_key_head(config)
    projection: Rule
    if config.generation == NEXT:
        names = tuple(f"{theirs}in_proj_{name}.weight" for name in ("qkvz", "ba"))
        projection = ByKeyHead(f"{ours}in_proj.weight", names, heads=config.linear_num_key_heads, rows=rows)
    else:
        names = tuple(f"{theirs}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
        q, k, v, z, b, a = (config.linear_num_key_heads * count for count in rows)
        projection = Blocks(f"{ours}in_proj.weight", names, sizes=(q + k + v, z, b, a))
    return [projection, *(Same(ours + canonical, theirs + external) for canonical, external in same.items())]


def _prediction_rules(config: QwenNextConfig) -> list[Rule]:
    """The layer of multi-token prediction, whose experts files hold one by one (Qwen3-Next, Qwen3.5) or packed
    (3.6)."""
    ours, layer = "mtp.layers.0.", "mtp.layers.0.mtp_model_layer."
    names = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "final_layernorm": "norm",
    }
    sparse = config.moe is not None and MoEOptions(config).layers[-1]
    inside = (*norm_rules(PRE_NORMS), *_attention_rules(config), *_feed_forward_rules(config, sparse=sparse))
    return [
        *(Same(f"{ours}{canonical}.weight", f"mtp.{external}.weight") for canonical, external in names.items()),
        *(_moved(rule, layer, "mtp.layers.0.") for rule in inside),
    ]


def _moved(rule: Rule, ours: str, theirs: str) -> Rule:
    """The rule of a layer under other prefixes."""
    return replace(
        rule,
        ours=ours + rule.ours.removeprefix(OURS),
        theirs=tuple(theirs + name.removeprefix(THEIRS) for name in rule.sources),
        others=tuple(_moved(other, ours, theirs) for other in rule.others),
    )


def spelling(config: QwenNextConfig, name: str) -> str:
    """Files with an image tower have the decoder one level deeper."""
    return name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """With the layer of multi-token prediction where a file has its tensors, and without it where it has not: files of
    Qwen3-Next have it and do not say so, those that transformers has written say so and do not have it."""
    count = int(any(name.startswith("mtp.") for name in names))
    if isinstance(text := external.get("text_config"), Mapping):
        return {**external, "text_config": {**text, MTP: count}}
    return {**external, MTP: count, **({ALSO_MTP: count} if ALSO_MTP in external else {})}


# -- configuration -----------------------------------------------------------------------------------------

MTP, ALSO_MTP = "mtp_num_hidden_layers", "num_nextn_predict_layers"
MOE_KEYS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "router_aux_loss_coef",
)  # fmt: skip
SECTIONS = "mrope_section"
KEYS = (*ROPE_KEYS, "partial_rotary_factor", "layer_types", "full_attention_interval", MTP, ALSO_MTP)


def model_type_of(config: QwenNextConfig) -> str:
    if config.generation == NEXT:
        return NEXT
    return DENSE if config.moe is None else SPARSE


def _import_positions(external: Mapping[str, Any]) -> dict[str, Any]:
    # Beside the table in older files; the class's default is 0.25.
    table = rope_table(external, partial_rotary_factor=external.get("partial_rotary_factor", 0.25))
    rotated = table.pop("partial_rotary_factor")
    # Which channels turn by the time, height and width of a picture. The three are equal in text.
    table.pop("mrope_interleaved", None)
    values = {**import_rope({"rope_parameters": table}), "rotary_percent": float(rotated)}
    sections = next(
        (external[key].get(SECTIONS) for key in ("rope_parameters", "rope_scaling") if external.get(key)), None
    )
    return values if sections is None else {**values, SECTIONS: list(sections)}


def _import_common(external: Mapping[str, Any]) -> dict[str, Any]:
    predicted = external.get(MTP, external.get(ALSO_MTP))
    return {
        **_import_positions(external),
        "linear_attention_freq": import_kinds(external, external["num_hidden_layers"]),
        "mtp_num_layers": int(predicted or 0),
    }


def _import_moe(external: Mapping[str, Any], layers: list[bool], *, experts: int, topk: int) -> dict[str, Any]:
    return {
        "num_experts": external.get("num_experts", experts),
        "moe_router_topk": external.get("num_experts_per_tok", topk),
        "moe_router_pre_softmax": not external.get("norm_topk_prob", True),
        "moe_ffn_hidden_size": external.get("moe_intermediate_size", 512),
        "moe_shared_expert_intermediate_size": external.get("shared_expert_intermediate_size", 512),
        "moe_shared_expert_gate": True,
        "moe_layer_freq": frequency_of(layers),
        **import_balance(external, default=0.001),
    }


def import_next(external: Mapping[str, Any]) -> dict[str, Any]:
    step, dense = external.get("decoder_sparse_step", 1), external.get("mlp_only_layers") or []
    experts = external.get("num_experts", 512)
    layers = [
        experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(external["num_hidden_layers"])
    ]
    moe = {"moe": _import_moe(external, layers, experts=512, topk=10)} if any(layers) else {}
    # The class of this generation takes no pictures.
    return {"generation": NEXT, **_import_common(external), SECTIONS: None, **moe}


def import_dense(external: Mapping[str, Any]) -> dict[str, Any]:
    return {"generation": "qwen3_5", **_import_common(external)}


def import_sparse(external: Mapping[str, Any]) -> dict[str, Any]:
    layers = [True] * external["num_hidden_layers"]
    moe = _import_moe(external, layers, experts=256, topk=8)
    # No layer is dense. Its width is that of the experts, so that nothing else divides by it.
    return {
        "generation": "qwen3_5", **_import_common(external), "moe": moe, "ffn_hidden_size": moe["moe_ffn_hidden_size"],
    }  # fmt: skip


def _export_common(config: QwenNextConfig) -> dict[str, Any]:
    return {
        **export_shape(config),
        **export_rope(config),
        "partial_rotary_factor": config.rotary_percent,
        "layer_types": export_kinds(config),
    }


def _export_moe(moe: MoEOptions, kind: str, **allowed: tuple[Any, ...]) -> dict[str, Any]:
    sizes = dict.fromkeys(("moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size"), ANY)
    moe.require(kind, **sizes, moe_shared_expert_gate=(True,), **allowed)
    if moe.shared_size is None:
        raise ConfigError(
            f"model.moe.moe_shared_expert_intermediate_size is not set: a Hugging Face {kind} has a shared expert"
        )
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn_size,
        "shared_expert_intermediate_size": moe.shared_size,
        **export_balance(moe),
    }


def export_next(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenNextConfig.model_validate(model)
    require_value(config, SECTIONS, (None,), NEXT)
    values = {**_export_common(config), "decoder_sparse_step": 1, ALSO_MTP: config.mtp_num_layers}
    if config.moe is None:
        return {**values, "mlp_only_layers": list(range(config.num_layers))}
    moe = MoEOptions(config)
    return {
        **values,
        **_export_moe(moe, NEXT, moe_layer_freq=ANY, moe_router_pre_softmax=ANY),
        "norm_topk_prob": not moe["moe_router_pre_softmax"],
        "mlp_only_layers": [number for number, sparse in enumerate(moe.layers) if not sparse],
    }


def export_dense(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenNextConfig.model_validate(model)
    return {**_export_common(config), **_sections(config), **_predicted(config)}


def _sections(config: QwenNextConfig) -> dict[str, Any]:
    """rope_scaling with the sections of pictures, of a model that has them."""
    if config.mrope_section is None:
        return {}
    scaling = export_rope(config)["rope_scaling"] or {"rope_type": "default"}
    return {"rope_scaling": {**scaling, SECTIONS: config.mrope_section, "mrope_interleaved": True}}


def export_sparse(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenNextConfig.model_validate(model)
    moe = MoEOptions(config)
    if not all(moe.layers):
        raise ConfigError(
            f"model.moe.moe_layer_freq={moe['moe_layer_freq']} cannot be written as a Hugging Face {SPARSE}, whose "
            "layers all have experts; model.generation=qwen3_next can be written with dense layers too"
        )
    values = {
        **_export_common(config),
        **_sections(config),
        **_export_moe(moe, SPARSE, moe_layer_freq=ANY),
        **_predicted(config),
    }
    # The class has no dense layers and no such field.
    del values["intermediate_size"]
    return values


def _predicted(config: QwenNextConfig) -> dict[str, Any]:
    return {MTP: config.mtp_num_layers, "mtp_use_dedicated_embeddings": False}


LINEAR_FIELDS = tuple(
    Field(key, key, default=default)
    for key, default in (
        ("linear_num_key_heads", 16),
        ("linear_num_value_heads", 32),
        ("linear_key_head_dim", 128),
        ("linear_value_head_dim", 128),
        ("linear_conv_kernel_dim", 4),
    )
)
FIXED = (SILU, Fixed("attention_bias", (False,)), *NOT_A_CHOICE)
OF_FILES_ONLY = (
    Fixed("attn_output_gate", (True,), written=False),
    Fixed("mtp_use_dedicated_embeddings", (False,), written=False),
)
SSM_DTYPE = {"mamba_ssm_dtype": "states are fp32 here whatever it says"}


def _fields(*, groups: int, without: tuple[str, ...] = ()) -> tuple[Field, ...]:
    return (
        *(entry for entry in decoder_fields(tied=False, positions=32768) if entry.theirs not in without),
        Field("num_key_value_heads", "num_query_groups", default=groups),
        Field("head_dim", "kv_channels", default=256),
        *LINEAR_FIELDS,
    )


QWEN3_NEXT = ConfigMap(
    architecture=NEXT,
    fields=_fields(groups=2),
    fixed=(*FIXED, *OF_FILES_ONLY, Fixed("use_sliding_window", (False,), written=False)),
    ignored={**IGNORED, **MOE_IGNORED, **SSM_DTYPE},
    import_extra=import_next,
    import_extra_keys=(*KEYS, *MOE_KEYS, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    export_extra=export_next,
)
QWEN3_5 = ConfigMap(
    architecture=DENSE,
    fields=_fields(groups=4),
    fixed=(*FIXED, *OF_FILES_ONLY),
    ignored={**IGNORED, **SSM_DTYPE},
    import_extra=import_dense,
    import_extra_keys=KEYS,
    export_extra=export_dense,
)
QWEN3_5_MOE = ConfigMap(
    architecture=SPARSE,
    fields=_fields(groups=2, without=("intermediate_size",)),
    fixed=(
        *FIXED,
        *OF_FILES_ONLY,
        Fixed("norm_topk_prob", (True,), written=False),
        Fixed("mlp_only_layers", ([], None), written=False),
        Fixed("decoder_sparse_step", (1,), written=False),
    ),
    ignored={**IGNORED, **MOE_IGNORED, **SSM_DTYPE},
    import_extra=import_sparse,
    import_extra_keys=(*KEYS, *MOE_KEYS),
    export_extra=export_sparse,
)

WITHIN = f"{DENSE} or {SPARSE}"

HUGGING_FACE = HuggingFaceFamily(
    family="qwen_next",
    model_types={
        NEXT: QWEN3_NEXT,
        DENSE: QWEN3_5,
        SPARSE: QWEN3_5_MOE,
        "qwen3_5": decoder_within("qwen3_5", QWEN3_5, WITHIN),
        "qwen3_5_moe": decoder_within("qwen3_5_moe", QWEN3_5_MOE, WITHIN),
    },
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    spelling=spelling,
    architectures={NEXT: "Qwen3NextForCausalLM", DENSE: "Qwen3_5ForCausalLM", SPARSE: "Qwen3_5MoeForCausalLM"},
    held=held,
)
