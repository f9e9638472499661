"""Dense Hunyuan models in Hugging Face's format."""

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
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.hunyuan.config import HunyuanConfig

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
        *feed_forward_rules(),
    ]
    return decoder_name_map(config, layer)


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


HUNYUAN = ConfigMap(
    architecture="hunyuan_v1_dense",
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=2048),
        Field("num_key_value_heads", "num_query_groups"),
        Field("head_dim", "kv_channels"),
        Field("attention_bias", "attention_bias", default=False),
    ),
    fixed=(
        Fixed("hidden_act", ("silu", "swish")),
        Fixed("use_qk_norm", (True,)),
        Fixed("use_cla", (False,), written=False),
        Fixed("mlp_bias", (False,), written=False),
        Fixed("norm_type", ("rms",), written=False),
        Fixed("use_rotary_pos_emb", (True,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
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
    },
    import_extra=import_extra,
    import_extra_keys=ROPE_KEYS,
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="hunyuan",
    model_types={"hunyuan_v1_dense": HUNYUAN},
    name_map=name_map,
    copies=tied_output,
    architectures={"hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM"},
)
