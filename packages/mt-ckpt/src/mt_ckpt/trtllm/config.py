"""config.json of a TensorRT-LLM checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import ConfigError

GPT, LLAMA = "GPTForCausalLM", "LlamaForCausalLM"
"""Architectures, the classes that build an engine."""
FAMILIES = ("gpt", "llama", "mistral")
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu",
    "relu": "relu",
    "squared_relu": "squared-relu",
    "silu": "silu",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "geglu_tanh": "geglu",
}
"""Its one gelu is the tanh form; the exact one differs from it by less than 5e-4."""
GATED = ("swiglu", "geglu", "geglu_tanh")
GPT_FACTORS: Mapping[str, tuple[Any, ...]] = {
    "embedding_multiplier": (1.0,),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1.0),
    "mup_base_hidden_size": (None,),
    "mtp_num_layers": (0,),
}
GPT_DEMANDS: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope", "alibi"),
    "qk_layernorm": (False,),
    "embedding_layernorm": (False,),
    "parallel_residual": (False,),
    "moe": (None,),
    **GPT_FACTORS,
}
LLAMA_DEMANDS: Mapping[str, tuple[Any, ...]] = {"moe": (None,), "rope_scaling_type": ("none", "linear", "llama3")}
LLAMA_OF_GPT_DEMANDS: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "activation": ("swiglu",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "qk_layernorm": (False,),
    "add_qkv_bias": (False,),
    "embedding_layernorm": (False,),
    "parallel_residual": (False,),
    "moe": (None,),
    **GPT_FACTORS,
}
"""Keys of a gpt with RMSNorm, which only the Llama architecture has."""
DTYPES = ("float16", "bfloat16", "float32")
POSITIONS = 4096
"""Length of a gpt with rotary positions, which does not say it; llama's default. Engines have limits of their own."""


def require_expressible(model: Any, options: ConvertOptions) -> None:
    """Raises ConfigError for a model or a layout that has no such checkpoint, naming the key."""
    if model.family not in FAMILIES:
        raise ConfigError(
            f"model.family={model.family} cannot be written for TensorRT-LLM; it can be {_listed(FAMILIES)}"
        )
    for key, values in _demands(model).items():
        # A family without the key has the first value, which is what the architecture means.
        if getattr(model, key, values[0]) not in values:
            legal = " or ".join(map(str, values))
            raise ConfigError(
                f"model.{key}={getattr(model, key)} cannot be written for TensorRT-LLM's {architecture_of(model)}; "
                f"it can be {legal}"
            )
    tp, pp = options.target_tensor_parallel_size, options.target_pipeline_parallel_size
    _require(model.num_attention_heads % tp == 0, "tensor", tp, "model.num_attention_heads", model.num_attention_heads)
    # Fewer key-value heads than ranks: each is on several ranks, see `shards`.
    groups = model.query_groups
    _require(groups % tp == 0 or tp % groups == 0, "tensor", tp, "model.num_query_groups", groups)
    _require(model.ffn_size % tp == 0, "tensor", tp, "model.ffn_hidden_size", model.ffn_size)
    if pp > model.num_layers:
        raise ConfigError(f"--target-pipeline-parallel-size {pp} is more than the model's {model.num_layers} layers")


def architecture_of(model: Any) -> str:
    """A gpt with RMSNorm is a Llama in all but name, or cannot be written."""
    return GPT if model.family == "gpt" and model.normalization == "LayerNorm" else LLAMA


def _demands(model: Any) -> Mapping[str, tuple[Any, ...]]:
    if model.family != "gpt":
        return LLAMA_DEMANDS
    return GPT_DEMANDS if architecture_of(model) == GPT else LLAMA_OF_GPT_DEMANDS


def _require(fits: bool, kind: str, size: int, key: str, value: int) -> None:
    if not fits:
        raise ConfigError(f"--target-{kind}-parallel-size {size} does not divide {key}={value}; choose one that does")


def _listed(names: Any) -> str:
    return ", ".join(names)


def write_config(model: Any, dtype: str, options: ConvertOptions, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.json. dtype: of what is not quantized, as torch calls it. quantization: that section."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"weights of dtype {dtype} cannot be written for TensorRT-LLM; use --dtype fp32, bf16 or fp16"
        )
    tp, pp = options.target_tensor_parallel_size, options.target_pipeline_parallel_size
    return {
        "architecture": architecture_of(model),
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_size": model.head_dim,
        "qk_layernorm": False,
        "norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp},
        "quantization": dict(quantization),
        **(_gpt(model) if architecture_of(model) == GPT else _llama(model)),
    }


def _gpt(model: Any) -> dict[str, Any]:
    rotary = model.position_embedding_type == "rope"
    # GPT-J rotates neighbours, GPT-NeoX halves.
    pairs = "rope_gptj" if model.rotary_interleaved else "rope_gpt_neox"
    return {
        "hidden_act": ACTIVATIONS[model.activation],
        "position_embedding_type": pairs if rotary else model.position_embedding_type,
        "max_position_embeddings": model.max_position_embeddings,
        "bias": model.add_bias_linear,
        "q_scaling": 1.0,
        "apply_query_key_layer_scaling": False,
        "rotary_pct": model.rotary_percent if rotary else 1.0,
        "rotary_base": model.rotary_base,
        "rotary_embedding_dim": model.rotary_dim if rotary else 0,
        "rotary_scaling": None,
    }


def _llama(model: Any) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": model.max_position_embeddings or POSITIONS,
        "rotary_base": model.rotary_base,
        "rotary_embedding_dim": model.head_dim,
        "rotary_scaling": _rotary_scaling(model),
        "attn_bias": model.add_bias_linear if model.family == "gpt" else model.add_qkv_bias,
        "mlp_bias": model.add_bias_linear,
        "residual_mlp": False,
        "disable_weight_only_quant_plugin": False,
        "remove_duplicated_kv_heads": False,
        "fc_after_embed": False,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "layer_idx_offset": 0,
    }


def _rotary_scaling(model: Any) -> dict[str, Any] | None:
    if model.family == "gpt" or model.rope_scaling_type == "none":
        return None
    scaling = {
        "type": model.rope_scaling_type,
        "rope_type": model.rope_scaling_type,
        "factor": model.rope_scaling_factor,
    }
    if model.rope_scaling_type == "linear":
        return scaling
    return {
        **scaling,
        "low_freq_factor": model.rope_low_freq_factor,
        "high_freq_factor": model.rope_high_freq_factor,
        "original_max_position_embeddings": model.original_max_position_embeddings or model.max_position_embeddings,
    }
