"""Our configuration as Megatron's arguments, the other way of `arguments`.

What Megatron reads from a checkpoint with --use-checkpoint-args is all here. A model that its arguments cannot express
is refused, naming the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mt_ckpt.megatron.arguments import LEARNED, MOE_KEYS
from mt_ckpt.megatron.metadata import KEY
from mt_ckpt.megatron.model import Grid
from mt_ckpt.megatron.names import layer_of
from mt_ckpt.megatron.order import Pipeline
from mt_core.config.schema import Config
from mt_core.errors import ConfigError

ACTIVATIONS: Mapping[str, Mapping[str, bool]] = {
    "gelu": {},
    "gelu_tanh": {"openai_gelu": True},
    "squared_relu": {"squared_relu": True},
    "swiglu": {"swiglu": True},
}
"""Our activations -> the switches of Megatron that are on for them."""
SWITCHES = ("openai_gelu", "squared_relu", "swiglu", "quick_geglu", "bias_gelu_fusion", "bias_swiglu_fusion")
LLAMA3: Mapping[str, Any] = {
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron's use_rope_scaling takes for granted."""
LOCAL, FUSED = "local", "transformer_engine"


@dataclass(frozen=True)
class Target:
    """How the written checkpoint is divided, and in which number format."""

    grid: Grid
    pipeline: Pipeline
    padded_vocab_size: int
    vocab_divisible_by: int
    dtype: torch.dtype


def megatron_arguments(
    config: Config, metadata: Mapping[str, Any], target: Target, parameters: Collection[str], ckpt_format: str
) -> dict[str, Any]:
    """The attributes of the Namespace. metadata: of the source; arguments that came from Megatron are kept.

    Raises ConfigError for a model that Megatron does not have.
    """
    kept = carried_arguments(metadata)
    return {
        "transformer_impl": FUSED,
        "seq_length": config.data.seq_length,
        **kept,
        **_run(metadata),
        **_model(config, parameters, kept),
        **_layout(config, target),
        "ckpt_format": ckpt_format,
    }


def carried_arguments(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a reader of Megatron's formats found, as far as JSON could carry them."""
    carried = metadata.get(KEY)
    stored = carried.get("args", {}) if isinstance(carried, Mapping) else {}
    return {name: _restored(value) for name, value in stored.items() if not _is_object(value)}


def uses_fused_norms(args: Mapping[str, Any]) -> bool:
    """Whether the names are those of Transformer Engine's layers, as Megatron has them unless told otherwise."""
    return args["transformer_impl"] != LOCAL


def _is_object(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("<")


def _restored(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"torch\.\w+", value):
        found = getattr(torch, value.removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else value
    return value


# -- the model ---------------------------------------------------------------------------------------


def _model(config: Config, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    model = config.model
    families: Mapping[str, Callable[[Any, Collection[str], Mapping[str, Any]], dict[str, Any]]] = {
        "gpt": _gpt,
        "llama": _llama,
        "mistral": _llama,
        "qwen": _llama,
        "bert": _bert,
        "t5": _t5,
    }
    if model.family not in families:
        raise ConfigError(
            f"model.family={model.family} cannot be written as Megatron's arguments; these can: {', '.join(families)}"
        )
    return families[model.family](model, parameters, kept)


def _shared(model: Any) -> dict[str, Any]:
    _require(model, "activation", tuple(ACTIVATIONS))
    return {
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.head_dim,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups if model.query_groups != model.num_attention_heads else 1,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "layernorm_epsilon": model.norm_epsilon,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "apply_layernorm_1p": False,
        "layernorm_zero_centered_gamma": False,
        "vocab_size": model.vocab_size,
        **{switch: ACTIVATIONS[model.activation].get(switch, False) for switch in SWITCHES},
    }


def _decoder(model: Any, parameters: Collection[str]) -> dict[str, Any]:
    return {
        **_shared(model),
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "qk_layernorm": model.qk_layernorm,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias or model.add_bias_linear,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        **_window(model),
        **_moe(model, parameters),
    }


def _gpt(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    _require(model, "position_embedding_type", (LEARNED, "rope", "none"))
    _require(model, "parallel_residual", (False,))
    _require(model, "embedding_layernorm", (False,))
    longest = model.max_position_embeddings or kept.get("max_position_embeddings") or kept.get("seq_length") or 2048
    return {
        **_decoder(model, parameters),
        "max_position_embeddings": longest,
        **_position_type(model.position_embedding_type),
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": model.rotary_interleaved,
        "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None,
    }


def _llama(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    if getattr(model, "attention_bias", False) != getattr(model, "mlp_bias", False):
        raise ConfigError(
            f"model.attention_bias={model.attention_bias} with model.mlp_bias={model.mlp_bias} cannot be written as "
            "Megatron's arguments, where all linear layers have biases or none; they have to be equal"
        )
    return {
        **_decoder(model, parameters),
        "max_position_embeddings": model.max_position_embeddings,
        **_position_type("rope"),
        "rotary_base": model.rotary_base,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        **_rope_scaling(model),
    }


def _rope_scaling(model: Any) -> dict[str, Any]:
    _require(model, "rope_scaling_type", ("none", "linear", "llama3"))
    if model.rope_scaling_type != "llama3":
        return {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": model.rope_scaling_factor}
    for key, value in LLAMA3.items():
        given = getattr(model, key)
        if key == "original_max_position_embeddings":
            given = given or model.max_position_embeddings
        if given != value:
            raise ConfigError(f"model.{key}={given} cannot be written as Megatron's arguments, which fix it at {value}")
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": model.rope_scaling_factor,
        "rotary_seq_len_interpolation_factor": None,
    }


def _position_type(kind: str) -> dict[str, Any]:
    return {
        "position_embedding_type": kind,
        "add_position_embedding": kind == LEARNED,
        "use_rotary_position_embeddings": False,
    }


def _window(model: Any) -> dict[str, Any]:
    windows = {model.window_of(layer) for layer in range(model.num_layers)}
    if len(windows) > 1:
        raise ConfigError(
            f"model.family={model.family} with windows {sorted(map(str, windows))} in different layers cannot be "
            "written as Megatron's arguments; all layers have to be alike"
        )
    window = windows.pop()
    return {"window_size": None if window is None else (window - 1, 0), "window_attn_skip_freq": None}


def _moe(model: Any, parameters: Collection[str]) -> dict[str, Any]:
    if model.moe is None:
        return {"num_experts": None}
    options = dict(model.moe)
    with_experts = {found[1] for name in parameters if ".mlp.router." in name and (found := layer_of(name))}
    pattern = [int(layer in with_experts) for layer in range(model.num_layers)]
    types = options.get("moe_router_load_balancing_type", ["aux_loss"])
    losses = iter(options.get("moe_aux_loss_coeff") or [0.01] * len(types))
    coefficients = [next(losses, 0.0) if kind.endswith("loss") else 0.0 for kind in types]
    return {
        "num_experts": options["num_experts"],
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_topk": options.get("moe_router_topk", 2),
        "moe_router_pre_softmax": options.get("moe_router_pre_softmax", False),
        "moe_router_load_balancing_type": types[0] if len(types) == 1 else types,
        "moe_aux_loss_coeff": coefficients[0] if len(types) == 1 else coefficients,
        **{key: options[key] for key in MOE_KEYS if key in options},
        "moe_ffn_hidden_size": options.get("moe_ffn_hidden_size") or model.ffn_size,
    }


def _bert(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    _require(model, "layernorm_placement", ("pre",))
    if model.num_tokentypes not in (0, 2):
        raise ConfigError(f"model.num_tokentypes={model.num_tokentypes}: Megatron's BERT has 2 or none (0)")
    return {
        **_shared(model),
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "max_position_embeddings": model.max_position_embeddings,
        **_position_type(LEARNED),
        "qk_layernorm": False,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
        "bert_binary_head": model.bert_binary_head,
        "num_experts": None,
    }


def _t5(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    _require(model, "scale_attention_scores", (True,))
    if model.output_scale != 1.0:
        raise ConfigError("model.scale_output=true: Megatron's T5 does not scale its output; it can be false")
    return {
        **_shared(model),
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "decoder_num_layers": model.decoder_layers,
        "max_position_embeddings": model.max_position_embeddings or kept.get("max_position_embeddings") or 512,
        **_position_type(model.position_embedding_type),
        "relative_attention_num_buckets": model.relative_attention_num_buckets,
        "relative_attention_max_distance": model.relative_attention_max_distance,
        "qk_layernorm": False,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_bias_linear,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "num_experts": None,
    }


def _require(model: Any, key: str, allowed: tuple[Any, ...]) -> None:
    given = getattr(model, key)
    if given not in allowed:
        legal = ", ".join(str(value) for value in allowed)
        raise ConfigError(f"model.{key}={given} cannot be written as Megatron's arguments; it can be {legal}")


# -- the run and its layout --------------------------------------------------------------------------

RUN_KEYS: Mapping[str, tuple[str, ...]] = {
    "data": ("seq_length",),
    "train": ("micro_batch_size", "global_batch_size", "train_iters", "train_samples", "seed"),
    "optimizer": ("optimizer", "lr", "min_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
    "lr_schedule": (
        "lr_decay_style",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_fraction",
        "lr_warmup_init",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_wsd_decay_style",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_samples",
    ),
    "tokenizer": ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model"),
}
"""Keys of our sections that are Megatron's arguments of the same name."""


def _run(metadata: Mapping[str, Any]) -> dict[str, Any]:
    stored = metadata.get("config", {})
    args: dict[str, Any] = {
        "iteration": int(metadata.get("iteration", 0)),
        "consumed_train_samples": int(metadata.get("consumed_samples", 0)),
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    for section, keys in RUN_KEYS.items():
        args |= {key: stored[section][key] for key in keys if stored.get(section, {}).get(key) is not None}
    if args.get("tokenizer_type") == "NullTokenizer":
        args.setdefault("null_tokenizer_eod_id", None)  # its presence says that vocab_size counts every id
    return args


def _layout(config: Config, target: Target) -> dict[str, Any]:
    grid, pipeline = target.grid, target.pipeline
    virtual = pipeline.parts if pipeline.parts > 1 else None
    layers = getattr(config.model, "num_layers", 0)
    stage = math.lcm(grid.tp, grid.etp * grid.ep)  # the fewest processes that hold all of a stage
    return {
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": pipeline.stages,
        "transformer_pipeline_model_parallel_size": pipeline.stages,
        "virtual_pipeline_model_parallel_size": virtual,
        "num_layers_per_virtual_pipeline_stage": layers // pipeline.runs if virtual else None,
        "num_virtual_stages_per_pipeline_rank": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.etp,
        "context_parallel_size": 1,
        "data_parallel_size": stage // grid.tp,
        "world_size": stage * pipeline.stages,
        "sequence_parallel": False,
        "use_distributed_optimizer": False,
        "make_vocab_size_divisible_by": target.vocab_divisible_by,
        "padded_vocab_size": target.padded_vocab_size,
        "params_dtype": target.dtype,
        "bf16": target.dtype == torch.bfloat16,
        "fp16": target.dtype == torch.float16,
    }
