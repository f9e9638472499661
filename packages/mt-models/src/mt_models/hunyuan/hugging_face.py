"""Hunyuan in Hugging Face's format: dense models, and those with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap
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
    rope_table,
)
from mt_models.blocks.hugging_face_moe import MOE_IGNORED, ExpertNames, expert_rules
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.hunyuan.config import HunyuanConfig

DENSE, EXPERTS = "hunyuan_v1_dense", "hunyuan_v1_moe"
ROUTER = "mlp.gate.wg.weight"
NAMES = ExpertNames(router=ROUTER, stacked_router=ROUTER, shared="mlp.shared_mlp")
NORMS = {
    "self_attention.q_layernorm": "self_attn.query_layernorm",
    "self_attention.k_layernorm": "self_attn.key_layernorm",
}
UNREAD = ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "factor")
"""Parameters that files have beside alpha, which alone counts."""


def name_map(config: HunyuanConfig) -> NameMap:
    bias = config.attention_bias
    layer = [
        *norm_rules(PRE_NORMS),
        *norm_rules(NORMS),
        *attention_rules(config, qkv_bias=bias, output_bias=bias),
        *(feed_forward_rules() if config.moe is None else expert_rules(MoEOptions(config), NAMES)),
    ]
    return decoder_name_map(config, layer)


def model_type_of(config: HunyuanConfig) -> str:
    return DENSE if config.moe is None else EXPERTS


# -- configuration: dense ------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    if external.get("head_dim") is None:
        raise ConfigError("head_dim is not set; the class has no default for it")
    table = rope_table(external)
    alpha = table.get("alpha")
    if table["rope_type"] != "dynamic" or not alpha:
        table.pop("alpha", None)
        return import_rope({"rope_parameters": table})
    table = {key: value for key, value in table.items() if key not in UNREAD}
    values = import_rope({"rope_parameters": {**table, "rope_type": "default"}})
    return {**values, "rope_scaling_type": "ntk", "rope_ntk_alpha": float(alpha)}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = HunyuanConfig.model_validate(model)
    if config.rope_scaling_type != "ntk":
        return {**export_shape(config), **export_rope(config)}
    # transformers calls it dynamic, and asks for a factor, which does not count beside alpha.
    scaling = {"rope_type": "dynamic", "alpha": config.rope_ntk_alpha, "factor": 1.0}
    return {**export_shape(config), "rope_theta": config.rotary_base, "rope_scaling": scaling}


FIELDS = (
    *decoder_fields(tied=False, epsilon=1e-5, positions=2048),
    Field("num_key_value_heads", "num_query_groups"),
    Field("head_dim", "kv_channels"),
    Field("attention_bias", "attention_bias", default=False),
)
FIXED = (
    Fixed("hidden_act", ("silu", "swish")),
    Fixed("use_qk_norm", (True,)),
    Fixed("use_cla", (False,), written=False),
    Fixed("mlp_bias", (False,), written=False),
    Fixed("norm_type", ("rms",), written=False),
    Fixed("use_rotary_pos_emb", (True,), written=False),
    *NOT_A_CHOICE,
)
NOT_READ = {
    **IGNORED,
    **dict.fromkeys(
        (
            "eod_token_id",
            "im_start_id",
            "im_end_id",
            "text_start_id",
            "text_end_id",
            "mask_init_id",
            "image_token_id",
        ),
        "ids of special tokens belong to the tokenizer",
    ),
    **dict.fromkeys(
        ("add_classification_head", "class_num", "pool_type", "num_media_embeds", "org_vocab_size"),
        "of classification heads and images; the class does not read it",
    ),
    "attention_head_dim": "repeats head_dim, which the class reads",
    "cla_share_factor": "only counts with use_cla",
}
HUNYUAN = ConfigMap(
    architecture=DENSE,
    fields=FIELDS,
    fixed=FIXED,
    ignored=NOT_READ,
    import_extra=import_extra,
    import_extra_keys=ROPE_KEYS,
    export_extra=export_extra,
)


# -- configuration: with experts ---------------------------------------------------------------------

COUNT, TOPK, SHARED, WIDTH = "num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size"


def import_with_experts(external: Mapping[str, Any]) -> dict[str, Any]:
    width = external.get("intermediate_size", 11008)
    # The class reads neither: experts and the shared one are as wide as intermediate_size says.
    for key, fixed in ((WIDTH, width), (SHARED, 1)):
        if (value := of_all_layers(external, key, fixed)) != fixed:
            raise ConfigError(f"{key}={value} is not supported; it can be {fixed} in every layer")
    moe = {
        "num_experts": of_all_layers(external, COUNT, 1),
        "moe_router_topk": of_all_layers(external, TOPK, 1),
        "moe_shared_expert_intermediate_size": width,
        "moe_router_load_balancing_type": ["aux_loss"],
        "moe_aux_loss_coeff": [0.001],
    }
    return {**import_extra(external), "moe": moe}


def of_all_layers(external: Mapping[str, Any], key: str, default: int) -> int:
    """A number, which a file may say for every layer. Raises ConfigError for layers that differ."""
    value = external.get(key, default)
    numbers = value if isinstance(value, list) else [value]
    if len(set(numbers)) != 1:
        raise ConfigError(f"{key}={value} is not supported; it can be one number for all layers")
    return int(numbers[0])


EXPRESSED = dict.fromkeys(("moe_router_topk", "moe_ffn_hidden_size"), ANY)


def export_with_experts(model: Mapping[str, Any]) -> dict[str, Any]:
    config = HunyuanConfig.model_validate(model)
    moe = MoEOptions(config)
    moe.require(EXPERTS, **EXPRESSED, moe_shared_expert_intermediate_size=(moe.ffn_size,))
    return {
        **export_extra(model),
        "intermediate_size": moe.ffn_size,
        COUNT: moe.num_experts,
        TOPK: moe.topk,
        SHARED: 1,
        WIDTH: moe.ffn_size,
    }


OF_IMAGES = (
    "anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "im_newline_id", "skip_cls_token",
    "video_start_id", "video_end_id", "vit_add_patchemb_bias", "vit_input_resolution", "vit_mapping_type",
    "vit_norm_type", "vit_patch", "vit_path", "vit_remove_prenorm", "vit_token", "vit_type", "vit_used_rms_norm",
)  # fmt: skip
OF_LATENTS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
HUNYUAN_MOE = ConfigMap(
    architecture=EXPERTS,
    fields=FIELDS,
    fixed=(
        *FIXED,
        Fixed("norm_topk_prob", (True,), written=False),
        Fixed("use_mixed_mlp_moe", (True,), written=False),
        Fixed("moe_layer_num_skipped", (0,), written=False),
        Fixed("routed_scaling_factor", (1.0,), written=False),
        Fixed("group_limited_greedy", (False,), written=False),
        Fixed("use_mla", (False,), written=False),
        Fixed("position_embedding_xdrope", (False,), written=False),
    ),
    ignored={
        **NOT_READ,
        **MOE_IGNORED,
        **dict.fromkeys(OF_IMAGES, "of images; the class does not read it"),
        **dict.fromkeys(OF_LATENTS, "only counts with use_mla"),
        **dict.fromkeys(("n_group", "topk_group"), "only counts with group_limited_greedy"),
        **dict.fromkeys(
            ("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token"),
            "of the code that trained the model; the class drops no token",
        ),
        "xdrope_section": "only counts with position_embedding_xdrope",
        "pad_id": "repeats pad_token_id",
    },
    import_extra=import_with_experts,
    import_extra_keys=(*ROPE_KEYS, COUNT, TOPK, SHARED, WIDTH),
    export_extra=export_with_experts,
    spellings={"num_experts_per_tok": TOPK, "num_local_experts": COUNT},
)

HUGGING_FACE = HuggingFaceFamily(
    family="hunyuan",
    model_types={DENSE: HUNYUAN, EXPERTS: HUNYUAN_MOE},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    architectures={DENSE: "HunYuanDenseV1ForCausalLM", EXPERTS: "HunYuanMoEV1ForCausalLM"},
)
