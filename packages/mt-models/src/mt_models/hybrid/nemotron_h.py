"""NemotronH in Hugging Face's format: a layer is norm and mixer, whatever the kind of mixer.

Nemotron 3 has layers of experts without a gate, which may work on a latent of the tokens, and layers of multi-token
prediction, numbered through over all depths. The class of transformers leaves these out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import POSITIONS, longest_sequence, one_of
from mt_models.blocks.hugging_face_mamba import KERNELS, OF_MAMBA1, mixer_rules
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    ExpertNames,
    expert_rules,
    export_bias,
    group_scores,
    import_bias,
    import_groups,
    require_normalized,
)
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, OF_GENERATION, require_value
from mt_models.hybrid.config import ATTENTION, EXPERTS, FEED_FORWARD, MAMBA, NEUTRAL_FACTORS, HybridConfig
from mt_models.hybrid.rules import attention_rules, plain_feed_forward_rules

NORMS = {MAMBA: "norm", ATTENTION: "input_layernorm", FEED_FORWARD: "pre_mlp_layernorm", EXPERTS: "pre_mlp_layernorm"}
NAMES = ExpertNames(
    router="mixer.gate.weight",
    gate="",
    up="mixer.experts.{e}.up_proj.weight",
    down="mixer.experts.{e}.down_proj.weight",
    shared="mixer.shared_experts",
    expert_bias="mixer.gate.e_score_correction_bias",
    stacked_router="mixer.gate.weight",
    stacked_gate_up="mixer.experts.up_proj",
    stacked_down="mixer.experts.down_proj",
    latent_down="mixer.fc1_latent_proj.weight",
    latent_up="mixer.fc2_latent_proj.weight",
)
SYMBOLS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": FEED_FORWARD,
    "moe": EXPERTS,
}
"""`layers_block_type` -> ours; `mamba` and `attention` are the names of older versions."""
ACTIVATIONS = {
    "relu2": "squared_relu",
    "relu": "relu",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
NO_POSITIONS = "the class has no positions in attention, whatever the file says"
SMALLEST_TIME_STEP = 1e-30
"""Written for a lower limit of 0, since transformers takes the logarithm of it for new weights."""


# -- names -----------------------------------------------------------------------------------------


def name_map(config: HybridConfig) -> NameMap:
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "model.embeddings.weight"),
        *(rule for number, symbol in enumerate(config.layers) for rule in _layer_rules(config, number, symbol)),
        Same("decoder.final_layernorm.weight", "model.norm_f.weight"),
        Same("output_layer.weight", "lm_head.weight"),
        *(rule for depth in range(config.mtp_num_layers) for rule in _prediction_rules(config, depth)),
    ]
    return NameMap(rules, config.num_layers)


def _layer_rules(config: HybridConfig, number: int, symbol: str) -> list[Rule]:
    return _block_rules(config, symbol, f"decoder.layers.{number}.", f"model.layers.{number}.")


def _prediction_rules(config: HybridConfig, depth: int) -> list[Rule]:
    pattern = config.predicted_pattern
    ours, first = f"mtp.layers.{depth}.", depth * len(pattern)
    last = first + len(pattern) - 1
    rules: list[Rule] = [Same(f"{ours}{name}.weight", f"mtp.layers.{first}.{name}.weight") for name in BEFORE_DEPTH]
    for place, symbol in enumerate(pattern):
        inner, theirs = f"{ours}mtp_model_layer.layers.{place}.", f"mtp.layers.{first + place}."
        rules += _block_rules(config, symbol, inner, theirs)
    return [*rules, Same(f"{ours}final_layernorm.weight", f"mtp.layers.{last}.final_layernorm.weight")]


BEFORE_DEPTH = ("enorm", "hnorm", "eh_proj")
"""Modules that stand with the first layer of a depth."""


def _block_rules(config: HybridConfig, symbol: str, ours: str, theirs: str) -> list[Rule]:
    mixers = {
        MAMBA: lambda: mixer_rules(config, f"{ours}mixer.", f"{theirs}mixer."),
        ATTENTION: lambda: attention_rules(config, f"{ours}self_attention.", f"{theirs}mixer."),
        FEED_FORWARD: lambda: plain_feed_forward_rules(f"{ours}mlp.", f"{theirs}mixer."),
        EXPERTS: lambda: expert_rules(MoEOptions(config), NAMES, ours=ours, theirs=theirs, always_biased=True),
    }
    return [Same(f"{ours}{NORMS[symbol]}.weight", f"{theirs}norm.weight"), *mixers[symbol]()]


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Without layers of multi-token prediction where a file has none: its class leaves them out and keeps the count."""
    if not external.get(PREDICTED) or any(name.startswith("mtp.") for name in names):
        return external
    return {**external, PREDICTED: 0}


# -- configuration ---------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    layers, predicted = _pattern(external), _predicted(external)
    epsilon = one_of(external, ("layer_norm_epsilon", "rms_norm_eps", "norm_eps"), 1e-5)
    return {
        "hybrid_layer_pattern": layers,
        "kv_channels": one_of(external, ("head_dim", "attention_head_dim"), 128),
        "norm_epsilon": float(epsilon),
        "position_embedding_type": "none",
        **longest_sequence(external),
        **({"mtp_hybrid_override_pattern": predicted} if predicted else {}),
        **({"moe": _import_experts(external)} if EXPERTS in layers + predicted else {}),
    }


def _pattern(external: Mapping[str, Any]) -> str:
    # Newer files list the kinds; older ones have Megatron's pattern, whose symbols are those of this family.
    listed = external.get("layers_block_type") or external.get("layer_types")
    pattern = external.get("hybrid_override_pattern")
    if listed is None and pattern is None:
        raise ConfigError(
            "the configuration of this nemotron_h has neither layers_block_type nor hybrid_override_pattern"
        )
    if listed is None:
        return str(pattern)
    return _symbols("layers_block_type", listed)


def _symbols(key: str, kinds: Iterable[Any]) -> str:
    return "".join(SYMBOLS[require_known(key, str(kind), SYMBOLS)] for kind in kinds)


PREDICTED = "num_nextn_predict_layers"
KINDS_OF_DEPTH, PATTERN_OF_DEPTH = "mtp_layers_block_type", "mtp_hybrid_override_pattern"
DEPTH = f"{ATTENTION}{EXPERTS}"
"""The layers of a depth, by default."""


def _predicted(external: Mapping[str, Any]) -> str:
    """The layers of each depth of multi-token prediction; "" without any."""
    if not external.get(PREDICTED):
        return ""
    listed, pattern = external.get(KINDS_OF_DEPTH), external.get(PATTERN_OF_DEPTH)
    kinds = None if listed is None else _symbols(KINDS_OF_DEPTH, listed)
    # transformers writes the list with its default for files that have the pattern, which counts then.
    if pattern is None or kinds not in (None, DEPTH, pattern):
        return str(one_of({"list": kinds, "pattern": pattern}, ("list", "pattern"), DEPTH))
    return str(pattern)


def _import_experts(external: Mapping[str, Any]) -> dict[str, Any]:
    require_normalized({"num_experts_per_tok": 2, **external})
    if external.get("n_shared_experts", 1) != 1:
        # The class has one, of the full width, whatever the number; other programs multiply.
        raise ConfigError(
            f"n_shared_experts={external['n_shared_experts']} is not supported; it can be 1, and "
            "moe_shared_expert_intermediate_size is the width of all shared experts together"
        )
    factor, latent = float(external.get("routed_scaling_factor", 1.0)), external.get("moe_latent_size")
    return {
        "num_experts": external.get("n_routed_experts", 8),
        "moe_router_topk": external.get("num_experts_per_tok", 2),
        "moe_ffn_hidden_size": external.get("moe_intermediate_size", 7688),
        "moe_shared_expert_intermediate_size": external.get("moe_shared_expert_intermediate_size", 7688),
        "moe_router_score_function": "sigmoid",
        **import_bias(external),
        **import_groups(external, score_topk=2),
        **({} if factor == 1.0 else {"moe_router_topk_scaling_factor": factor}),
        **({} if latent is None else {"moe_latent_size": latent}),
        # The class has no balance loss; this is what the models were trained with.
        "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_aux_loss_coeff": [0.0001],
    }


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = HybridConfig.model_validate(model)
    for key, value in (
        ("normalization", "RMSNorm"),
        ("hidden_dropout", 0.0),
        ("position_embedding_type", "none"),
        ("add_bias_linear", False),
        ("fp32_residual_connection", False),
        ("mamba_dt_upper_limit", None),
        ("untie_embeddings_and_output_weights", True),
        *NEUTRAL_FACTORS.items(),
    ):
        require_value(config, key, (value,), "nemotron_h")
    return {
        "hybrid_override_pattern": config.layers,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "mamba_num_heads": config.mamba_heads,
        "layer_norm_epsilon": config.norm_epsilon,
        **longest_sequence(model),
        **({PATTERN_OF_DEPTH: config.predicted_pattern} if config.mtp_num_layers else {}),
        **({} if config.moe is None else _export_experts(config)),
    }


def _export_experts(config: HybridConfig) -> dict[str, Any]:
    moe = MoEOptions(config)
    expressed = (
        "moe_ffn_hidden_size", "moe_latent_size", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size",
    )  # fmt: skip
    moe.require(
        "nemotron_h",
        **dict.fromkeys(expressed, ANY),
        moe_router_score_function=("sigmoid",),
        moe_router_group_score_topk=group_scores(moe, 2),
    )
    if moe.shared_size is None:
        raise ConfigError(
            "model.moe.moe_shared_expert_intermediate_size is not set, and a Hugging Face nemotron_h has shared "
            "experts in every layer of experts; set their width"
        )
    return {
        **export_bias(moe),
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn_size,
        "moe_shared_expert_intermediate_size": moe.shared_size,
        "moe_latent_size": moe["moe_latent_size"],
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "norm_topk_prob": moe.topk > 1,
        "n_group": moe["moe_router_num_groups"] or 1,
        "topk_group": moe["moe_router_group_topk"] or 1,
    }


def import_activation(name: str) -> str:
    return ACTIVATIONS[require_known("mlp_hidden_act", name, ACTIVATIONS)]


def export_activation(name: str) -> str:
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    if name not in names:
        raise ConfigError(
            f"model.activation={name} cannot be written as a nemotron_h; it can be {', '.join(names)}; with swiglu and "
            "a feed-forward behind every Mamba or attention layer and nowhere else it is a granitemoehybrid"
        )
    return names[name]


def import_time_step(limit: float) -> float:
    # Back to exactly 0, so that a round trip changes nothing.
    return 0.0 if limit <= SMALLEST_TIME_STEP else float(limit)


def export_time_step(limit: float) -> float:
    return max(limit, SMALLEST_TIME_STEP)


NEMOTRON_H = ConfigMap(
    architecture="nemotron_h",
    fields=(
        Field("vocab_size", "vocab_size", default=131072),
        Field("hidden_size", "hidden_size", default=4096),
        Field("num_attention_heads", "num_attention_heads", default=32),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("attention_dropout", "attention_dropout", import_value=float, default=0.0),
        Field("intermediate_size", "ffn_hidden_size", default=21504),
        Field("mlp_hidden_act", "activation", import_activation, export_activation, default="relu2"),
        Field("mamba_num_heads", "mamba_num_heads", default=128),
        Field("mamba_head_dim", "mamba_head_dim", default=64),
        Field("ssm_state_size", "mamba_state_dim", default=128),
        Field("n_groups", "mamba_num_groups", default=8),
        Field("conv_kernel", "mamba_conv_kernel", default=4),
        Field("use_conv_bias", "mamba_conv_bias", default=True),
        Field("use_bias", "mamba_proj_bias", default=False),
        Field("chunk_size", "mamba_chunk_size", default=128),
        # The class uses the smallest time step of new weights as the limit of all, with none above.
        Field("time_step_min", "mamba_dt_lower_limit", import_time_step, export_time_step, default=1e-3),
        Field("time_step_max", "mamba_dt_max", import_value=float, default=0.1),
        Field("time_step_floor", "mamba_dt_init_floor", import_value=float, default=1e-4),
        Field("initializer_range", "init_method_std", import_value=float, default=0.02),
        Field("num_nextn_predict_layers", "mtp_num_layers", default=0),
        Field("rescale_prenorm_residual", "use_scaled_init_method", default=True),
    ),
    fixed=(
        Fixed("tie_word_embeddings", (False,)),
        Fixed("attention_bias", (False,)),
        Fixed("mlp_bias", (False,)),
        Fixed("mamba_proj_bias", (False,)),
        Fixed("mamba_hidden_act", ("silu", "swish")),
        Fixed("residual_in_fp32", (False,)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "partial_rotary_factor": NO_POSITIONS,
        "rope_theta": NO_POSITIONS,
        **dict.fromkeys(("hidden_dropout", "sliding_window"), "not read by the Python class"),
        "expand": "mamba_num_heads and mamba_head_dim say it",
        "time_step_limit": "the class takes time_step_min and no upper limit instead",
        "time_step_rank": OF_MAMBA1,
        "use_mamba_kernels": KERNELS,
        "mamba_ssm_cache_dtype": "states are kept in fp32",
        "num_logits_to_keep": OF_GENERATION,
        **MOE_IGNORED,
        "moe_shared_expert_overlap": "when shared experts run, not what they compute",
        "keep_mtp_spec_in_bf16": "of the program that trained the model",
    },
    import_extra=import_extra,
    import_extra_keys=(
        "layers_block_type", "layer_types", "hybrid_override_pattern", "num_hidden_layers", "head_dim",
        "attention_head_dim", "layer_norm_epsilon", "rms_norm_eps", "norm_eps", POSITIONS,
        KINDS_OF_DEPTH, PATTERN_OF_DEPTH, "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
        "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size", "routed_scaling_factor",
        "n_group", "topk_group", "norm_topk_prob", BIAS_KEY,
    ),
    export_extra=export_extra,
    spellings={"num_local_experts": "n_routed_experts"},
)  # fmt: skip
