"""Jamba in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    THEIRS,
    attention_rules,
    decoder_fields,
    norm_rules,
    require_even_heads,
)
from mt_models.blocks.hugging_face_mamba import KERNELS
from mt_models.blocks.hugging_face_moe import (
    MOE_IGNORED,
    SILU,
    ExpertNames,
    expert_rules,
    export_balance,
    import_balance,
)
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, OF_GENERATION, HuggingFaceFamily, tied_output
from mt_models.jamba.config import JambaConfig

KIND = "jamba"
NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "pre_ff_layernorm"}
NAMES = ExpertNames(
    router="feed_forward.router.weight",
    gate="feed_forward.experts.{e}.gate_proj.weight",
    up="feed_forward.experts.{e}.up_proj.weight",
    down="feed_forward.experts.{e}.down_proj.weight",
    stacked_router="feed_forward.router.weight",
    stacked_gate_up="feed_forward.experts.gate_up_proj",
    stacked_down="feed_forward.experts.down_proj",
)
MIXER = (
    "in_proj.weight", "conv1d.weight", "x_proj.weight", "dt_layernorm.weight", "b_layernorm.weight",
    "c_layernorm.weight", "dt_proj.weight", "dt_proj.bias", "A_log", "D", "out_proj.weight",
)  # fmt: skip


def name_map(config: JambaConfig) -> NameMap:
    sparse = [False] * config.num_layers if config.moe is None else MoEOptions(config).layers
    rules: list[Rule] = []
    for number, (attends, experts) in enumerate(zip(config.attention_layers, sparse, strict=True)):
        block = attention_rules(config) if attends else _mixer_rules(config)
        feed_forward = expert_rules(MoEOptions(config), NAMES) if experts else _dense_rules()
        rules += [rule.for_layer(number) for rule in (*norm_rules(NORMS), *block, *feed_forward)]
    around = [
        Same("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        Same("decoder.final_layernorm.weight", "model.final_layernorm.weight"),
    ]
    if config.untie_embeddings_and_output_weights:
        around.append(Same("output_layer.weight", "lm_head.weight"))
    return NameMap([*around, *rules], config.num_layers)


def _mixer_rules(config: JambaConfig) -> list[Rule]:
    names = [*MIXER, *(["conv1d.bias"] if config.mamba_conv_bias else [])]
    names += ["in_proj.bias", "out_proj.bias"] if config.mamba_proj_bias else []
    return [Same(f"{OURS}mixer.{name}", f"{THEIRS}mamba.{name}") for name in names]


def _dense_rules() -> list[Rule]:
    halves = tuple(f"{THEIRS}feed_forward.{half}_proj.weight" for half in ("gate", "up"))
    return [
        Concatenate(f"{OURS}mlp.linear_fc1.weight", halves),
        Same(f"{OURS}mlp.linear_fc2.weight", f"{THEIRS}feed_forward.down_proj.weight"),
    ]


# -- configuration -----------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    rank, experts = external.get("mamba_dt_rank", "auto"), external.get("num_experts", 16)
    values = {} if rank == "auto" else {"mamba_dt_rank": rank}
    period, offset = external.get("expert_layer_period", 2), external.get("expert_layer_offset", 1)
    layers = [layer % period == offset for layer in range(external["num_hidden_layers"])]
    if experts == 1 or not any(layers):
        return values
    moe = {
        "num_experts": experts,
        "moe_router_topk": external.get("num_experts_per_tok", 2),
        "moe_router_pre_softmax": True,
        "moe_layer_freq": frequency_of(layers),
        **import_balance(external, default=0.001),
    }
    return {**values, "moe": moe}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = JambaConfig.model_validate(model)
    require_even_heads(config, KIND)
    return {
        "num_key_value_heads": config.query_groups,
        "intermediate_size": config.ffn_size,
        "mamba_dt_rank": config.time_step_rank,
        **_export_experts(config),
    }


def _export_experts(config: JambaConfig) -> dict[str, Any]:
    if config.moe is None:
        return {"num_experts": 1}
    moe = MoEOptions(config)
    moe.require(
        KIND,
        moe_layer_freq=ANY,
        moe_router_topk=ANY,
        moe_router_pre_softmax=(True,),
        moe_ffn_hidden_size=(None, config.ffn_size),
    )
    period, offset = _period(moe.layers)
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "expert_layer_period": period,
        "expert_layer_offset": offset,
        **export_balance(moe),
    }


def _period(layers: list[bool]) -> tuple[int, int]:
    """Distance of layers with experts, and the first of them. Raises ConfigError for another order."""
    numbers = [number for number, experts in enumerate(layers) if experts]
    period = numbers[1] - numbers[0] if len(numbers) > 1 else len(layers)
    if not numbers or layers != [number % period == numbers[0] for number in range(len(layers))]:
        raise ConfigError(
            f"model.moe.moe_layer_freq with experts in layers {numbers} cannot be written as a Hugging Face {KIND}, "
            "which has them in every n-th layer"
        )
    return period, numbers[0]


SAME = (
    "attn_layer_period", "attn_layer_offset", "mamba_expand", "mamba_conv_bias", "mamba_proj_bias",
)  # fmt: skip
DEFAULTS = {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_expand": 2, "mamba_conv_bias": True}
JAMBA = ConfigMap(
    architecture=KIND,
    fields=(
        *decoder_fields(tied=False, positions=262144),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("mamba_d_state", "mamba_state_dim", default=16),
        Field("mamba_d_conv", "mamba_conv_kernel", default=4),
        *(Field(name, name, default=DEFAULTS.get(name, False)) for name in SAME),
        Field("use_mamba_kernels", "use_mamba_kernels", default=True),
    ),
    fixed=(SILU, Fixed("sliding_window", (None,), written=False), *NOT_A_CHOICE),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        **dict.fromkeys(("use_mambapy", "use_associative_scan"), KERNELS),
        **dict.fromkeys(("layer_types", "layers_block_type", "layers_num_experts"), "follows from periods and offsets"),
        "mamba_inner_layernorms": "the class has them whatever it says",
        "num_logits_to_keep": OF_GENERATION,
    },
    import_extra=import_extra,
    import_extra_keys=(
        "mamba_dt_rank", "num_experts", "num_experts_per_tok", "expert_layer_period", "expert_layer_offset",
        "router_aux_loss_coef",
    ),
    export_extra=export_extra,
    spellings={"num_local_experts": "num_experts"},
)  # fmt: skip

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: JAMBA},
    name_map=name_map,
    copies=tied_output,
    architectures={KIND: "JambaForCausalLM"},
)
