"""Llama 4 in Hugging Face's format: the text model alone, whose files hold experts as [in, out] matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import ConfigMap, Field
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    PRE_NORMS,
    ROPE_KEYS,
    THEIRS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    import_rope,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import MOE_IGNORED, SILU
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.llama4.config import Llama4Config

CHUNKED = "chunked_attention"
LIST, INTERVAL, KINDS = "no_rope_layers", "no_rope_layer_interval", "layer_types"
TUNED, SCALE, FLOOR = "attn_temperature_tuning", "attn_scale", "floor_scale"
MOE_LAYERS, STEP = "moe_layers", "interleave_moe_layer_step"
WIDTH, DENSE_WIDTH = "intermediate_size", "intermediate_size_mlp"
KEYS = (LIST, INTERVAL, KINDS, TUNED, SCALE, FLOOR, MOE_LAYERS, STEP, WIDTH, DENSE_WIDTH)
MOE_KEYS = ("num_experts_per_tok", "num_local_experts", "attention_chunk_size")


@dataclass(frozen=True)
class TransposedExperts(Rule):
    """[experts, in, out] there, [experts, out, in] here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].transpose(1, 2).contiguous()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.transpose(1, 2).contiguous()]


def name_map(config: Llama4Config) -> NameMap:
    bias, moe = config.attention_bias, MoEOptions(config)
    layer = [*norm_rules(PRE_NORMS), *attention_rules(config, qkv_bias=bias, output_bias=bias)]
    feed_forwards = [
        rule.for_layer(number) for number, sparse in enumerate(moe.layers) for rule in (EXPERTS if sparse else DENSE)
    ]
    return decoder_name_map(config, [*layer, *feed_forwards])


def _feed_forward(ours: str, theirs: str) -> list[Rule]:
    halves = tuple(f"{THEIRS}{theirs}.{half}_proj.weight" for half in ("gate", "up"))
    return [
        Concatenate(f"{OURS}{ours}.linear_fc1.weight", halves),
        Same(f"{OURS}{ours}.linear_fc2.weight", f"{THEIRS}{theirs}.down_proj.weight"),
    ]


DENSE = _feed_forward("mlp", "feed_forward")
EXPERTS: list[Rule] = [
    Same(f"{OURS}mlp.router.weight", f"{THEIRS}feed_forward.router.weight"),
    # gate columns first
    TransposedExperts(f"{OURS}mlp.experts.linear_fc1.weight", f"{THEIRS}feed_forward.experts.gate_up_proj"),
    TransposedExperts(f"{OURS}mlp.experts.linear_fc2.weight", f"{THEIRS}feed_forward.experts.down_proj"),
    *_feed_forward("mlp.shared_experts", "feed_forward.shared_expert"),
]


# -- configuration -----------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    layers = external.get("num_hidden_layers", 48)
    scaled = external.get(TUNED, True)
    return {
        **import_rope(external, 500000.0),
        "ffn_hidden_size": external.get(DENSE_WIDTH, 16384),
        "moe": import_moe(external, layers),
        "no_rope_freq": import_layers(external, layers),
        "query_scaling_beta": float(external.get(SCALE, 0.1)) if scaled else 0.0,
        "query_scaling_length": external.get(FLOOR, 8192),
    }


def import_moe(external: Mapping[str, Any], layers: int) -> dict[str, Any]:
    topk = external.get("num_experts_per_tok", 1)
    if topk != 1:
        raise ConfigError(f"num_experts_per_tok={topk} is not supported; it can be 1")
    step, sparse = external.get(STEP, 1), external.get(MOE_LAYERS)
    if sparse is None:
        sparse = range(step - 1, layers, step)
    width = external.get(WIDTH, 8192)
    return {
        "num_experts": external.get("num_local_experts", 16),
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
        "moe_layer_freq": frequency_of([layer in sparse for layer in range(layers)]),
    }


def import_layers(external: Mapping[str, Any], layers: int) -> str:
    """Layers without positions, as a pattern: they see everything, the others their chunk."""
    interval, rotated = external.get(INTERVAL, 4), external.get(LIST)
    rotated = rotated or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(rotated) < layers or set(rotated) - {0, 1}:
        raise ConfigError(f"{LIST}={rotated} is not supported; it needs 0 or 1 for each of num_hidden_layers={layers}")
    if external.get("attention_chunk_size", 8192) is None:
        raise ConfigError("attention_chunk_size=None is not supported; it can be a number of positions")
    expected = [CHUNKED if rotates else FULL for rotates in rotated[:layers]]
    kinds = external.get(KINDS)
    if kinds is not None and kinds != expected:
        raise ConfigError(f"{KINDS}={kinds} is not supported; by {LIST} it has to be {expected}")
    return pattern_of([not rotates for rotates in rotated[:layers]])


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Llama4Config.model_validate(model)
    moe = MoEOptions(config)
    moe.require(
        "llama4_text",
        moe_layer_freq=ANY,
        moe_ffn_hidden_size=ANY,
        moe_router_topk=(1,),
        moe_router_score_function=("sigmoid",),
        moe_apply_probs_on_input=(True,),
        moe_shared_expert_intermediate_size=(moe.ffn_size,),
    )
    rotated = [config.rotates(layer) for layer in range(config.num_layers)]
    return {
        **export_shape(config),
        **export_rope(config),
        WIDTH: moe.ffn_size,
        DENSE_WIDTH: config.ffn_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": 1,
        MOE_LAYERS: [layer for layer, sparse in enumerate(moe.layers) if sparse],
        LIST: [int(rotates) for rotates in rotated],
        KINDS: [CHUNKED if rotates else FULL for rotates in rotated],
        TUNED: config.query_scaling_beta > 0,
        SCALE: config.query_scaling_beta or 0.1,
        FLOOR: config.query_scaling_length,
        "attention_chunk_size": config.seen_positions,
    }


LLAMA4 = ConfigMap(
    architecture="llama4_text",
    fields=(
        *(field for field in decoder_fields(tied=False, epsilon=1e-5, positions=131072) if field.theirs != WIDTH),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels", default=128),
        Field("attention_bias", "attention_bias", default=False),
        Field("use_qk_norm", "qk_l2_norm", default=True),
        Field("attention_chunk_size", "attention_chunk_size", default=8192),
    ),
    fixed=(SILU, *NOT_A_CHOICE),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "router_aux_loss_coef": "of a loss that the class does not compute; model.moe chooses one",
        "router_jitter_noise": "the class does not read it",
        "for_llm_compressor": "of a tool that compresses weights",
    },
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *KEYS, *MOE_KEYS),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="llama4",
    model_types={"llama4_text": LLAMA4},
    name_map=name_map,
    copies=tied_output,
    architectures={"llama4_text": "Llama4ForCausalLM"},
)
