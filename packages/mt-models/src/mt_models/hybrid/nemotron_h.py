"""NemotronH in Hugging Face's format: a layer is norm and mixer, whatever the kind of mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import POSITIONS, longest_sequence, one_of
from mt_models.blocks.hugging_face_mamba import KERNELS, OF_MAMBA1, mixer_rules
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, OF_GENERATION, require_value
from mt_models.hybrid.config import ATTENTION, EXPERTS, FEED_FORWARD, MAMBA, NEUTRAL_FACTORS, HybridConfig
from mt_models.hybrid.rules import attention_rules, plain_feed_forward_rules

NORMS = {MAMBA: "norm", ATTENTION: "input_layernorm", FEED_FORWARD: "pre_mlp_layernorm"}
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
OF_EXPERTS = "of layers of experts, which a pattern that is read has not"
SMALLEST_TIME_STEP = 1e-30
"""Written for a lower limit of 0, since transformers takes the logarithm of it for new weights."""


# -- names -----------------------------------------------------------------------------------------


def name_map(config: HybridConfig) -> NameMap:
    _require_no_experts(config.layers)
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "model.embeddings.weight"),
        *(rule for number, symbol in enumerate(config.layers) for rule in _layer_rules(config, number, symbol)),
        Same("decoder.final_layernorm.weight", "model.norm_f.weight"),
        Same("output_layer.weight", "lm_head.weight"),
    ]
    return NameMap(rules, config.num_layers)


def _layer_rules(config: HybridConfig, number: int, symbol: str) -> list[Rule]:
    ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
    mixers = {
        MAMBA: lambda: mixer_rules(config, f"{ours}mixer.", f"{theirs}mixer."),
        ATTENTION: lambda: attention_rules(config, f"{ours}self_attention.", f"{theirs}mixer."),
        FEED_FORWARD: lambda: plain_feed_forward_rules(f"{ours}mlp.", f"{theirs}mixer."),
    }
    return [Same(f"{ours}{NORMS[symbol]}.weight", f"{theirs}norm.weight"), *mixers[symbol]()]


def _require_no_experts(layers: str) -> None:
    if EXPERTS in layers:
        raise ConfigError(
            f"layer {layers.index(EXPERTS)} is a mixture of experts, which the names of a Hugging Face nemotron_h in "
            f"this map leave out; layers can be {', '.join(NORMS)}"
        )


# -- configuration ---------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    layers = _pattern(external)
    _require_no_experts(layers)
    epsilon = one_of(external, ("layer_norm_epsilon", "rms_norm_eps", "norm_eps"), 1e-5)
    return {
        "hybrid_layer_pattern": layers,
        "kv_channels": one_of(external, ("head_dim", "attention_head_dim"), 128),
        "norm_epsilon": float(epsilon),
        "position_embedding_type": "none",
        **longest_sequence(external),
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
    return "".join(SYMBOLS[require_known("layers_block_type", str(kind), SYMBOLS)] for kind in listed)


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = HybridConfig.model_validate(model)
    _require_no_experts(config.layers)
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
        Field("rescale_prenorm_residual", "use_scaled_init_method", default=True),
    ),
    fixed=(
        Fixed("tie_word_embeddings", (False,)),
        Fixed("attention_bias", (False,)),
        Fixed("mlp_bias", (False,)),
        Fixed("mamba_proj_bias", (False,)),
        Fixed("mamba_hidden_act", ("silu", "swish")),
        Fixed("residual_in_fp32", (False,)),
        Fixed("num_nextn_predict_layers", (0,)),
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
        "mtp_layers_block_type": "of layers of multi-token prediction, of which there are none",
        **dict.fromkeys(
            (
                "num_local_experts",
                "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
                "moe_latent_size", "moe_shared_expert_overlap", "num_experts_per_tok", "routed_scaling_factor",
                "n_group", "topk_group", "norm_topk_prob", "output_router_logits",
            ),
            OF_EXPERTS,
        ),
    },
    import_extra=import_extra,
    import_extra_keys=(
        "layers_block_type", "layer_types", "hybrid_override_pattern", "num_hidden_layers", "head_dim",
        "attention_head_dim", "layer_norm_epsilon", "rms_norm_eps", "norm_eps", POSITIONS,
    ),
    export_extra=export_extra,
)  # fmt: skip
