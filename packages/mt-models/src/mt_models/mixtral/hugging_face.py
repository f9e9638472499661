"""Mixtral in Hugging Face's format. With sigmoid scores and shared experts it is exported in
GLM-4.5's, as a Qwen-MoE is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config.schema import ModelConfig
from mt_core.config_map import ConfigMap, Field
from mt_core.name_map import NameMap
from mt_models.blocks.config import DecoderConfig
from mt_models.blocks.hugging_face_decoder import (
    PRE_NORMS,
    ROPE_KEYS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    import_rope,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import (
    MOE_IGNORED,
    SILU,
    ExpertNames,
    export_balance,
    import_balance,
    mixed_feed_forward_rules,
)
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output
from mt_models.mixtral.config import MixtralConfig
from mt_models.qwen_moe.config import QwenMoeConfig
from mt_models.qwen_moe.glm4_moe import is_glm4_moe
from mt_models.qwen_moe.hugging_face import HUGGING_FACE as QWEN_MOE
from mt_models.qwen_moe.hugging_face import name_map as qwen_moe_name_map

# w1 is the gate and w3 the up projection, as in Llama's original code; w2 leads back.
NAMES = ExpertNames(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{e}.w1.weight",
    up="block_sparse_moe.experts.{e}.w3.weight",
    down="block_sparse_moe.experts.{e}.w2.weight",
)
MOE_KEYS = ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef", "router_jitter_noise")


def as_qwen_moe(config: MixtralConfig) -> QwenMoeConfig:
    """The same model in the other family. Raises ConfigError for windows, which that does not have."""
    require_value(config, "sliding_window", (None,), "glm4_moe")
    # The fields of DecoderConfig are those of both families; what Mixtral adds, the window, is checked above.
    keys = {key: getattr(config, key) for key in DecoderConfig.model_fields if key != "family"}
    return QwenMoeConfig(family="qwen_moe", add_qkv_bias=False, qk_layernorm=False, **keys)


def name_map(config: MixtralConfig) -> NameMap:
    if is_glm4_moe(config.moe):
        return qwen_moe_name_map(as_qwen_moe(config))
    layer = [*norm_rules(PRE_NORMS), *attention_rules(config), *mixed_feed_forward_rules(config, NAMES)]
    return decoder_name_map(config, layer)


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    moe = {
        "num_experts": external.get("num_local_experts", 8),
        "moe_router_topk": external.get("num_experts_per_tok", 2),
        **import_balance(external, default=0.001),
    }
    if jitter := external.get("router_jitter_noise"):
        moe["moe_input_jitter_eps"] = float(jitter)
    return {**import_rope(external, default_base=1e6), "sliding_window": external.get("sliding_window"), "moe": moe}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MixtralConfig.model_validate(model)
    moe = MoEOptions(config)
    moe.require("mixtral", moe_ffn_hidden_size=ANY, moe_router_topk=ANY)
    return {
        **export_shape(config),
        **export_rope(config),
        **export_balance(moe),
        "intermediate_size": moe.ffn_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "router_jitter_noise": moe.options.get("moe_input_jitter_eps") or 0.0,
        "sliding_window": config.sliding_window,
    }


MIXTRAL = ConfigMap(
    architecture="mixtral",
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=4096 * 32),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels"),
    ),
    fixed=(SILU, *NOT_A_CHOICE),
    ignored={**IGNORED, **MOE_IGNORED},
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS, "sliding_window"),
    export_extra=export_extra,
)


class MixtralFamily(HuggingFaceFamily):
    """Exports an MoE with sigmoid scores and shared experts in the format that has both."""

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, MixtralConfig)
        if is_glm4_moe(config.moe):
            return QWEN_MOE.write_config(as_qwen_moe(config))
        return super().write_config(config)


HUGGING_FACE = MixtralFamily(
    family="mixtral",
    model_types={"mixtral": MIXTRAL},
    name_map=name_map,
    copies=tied_output,
    architectures={"mixtral": "MixtralForCausalLM"},
)
