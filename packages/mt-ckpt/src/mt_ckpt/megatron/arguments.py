"""Megatron's arguments, which travel in its checkpoints, as our configuration.

Every argument that changes what a model computes is read here, or has to have the value that our families mean. The
others (data, logging, kernels, parallel layout, serving, ...) change nothing that is stored; all of them are kept as
they are in the reader's metadata under `megatron.args`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mt_core.errors import CheckpointError, ConfigError

REQUIRED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "multi_latent_attention": ((False,), "multi-latent attention"),
    "experimental_attention_variant": ((None,), "an experimental attention"),
    "linear_attention_freq": ((None,), "linear attention"),
    "mtp_num_layers": ((None, 0), "multi-token prediction"),
    "is_hybrid_model": ((False,), "a hybrid of attention and Mamba layers"),
    "hybrid_layer_pattern": ((None,), "a hybrid of attention and Mamba layers"),
    "hybrid_override_pattern": ((None,), "a hybrid of attention and Mamba layers"),
    "hybrid_attention_ratio": ((None, 0, 0.0), "a hybrid of attention and Mamba layers"),
    "heterogeneous_layers_config_path": ((None,), "layers of different shapes"),
    "heterogeneous_layers_config_encoded_json": ((None,), "layers of different shapes"),
    "apply_residual_connection_post_layernorm": ((False,), "a residual taken behind the norm"),
    "layernorm_zero_centered_gamma": ((False,), "norm weights stored less one"),
    "apply_layernorm_1p": ((False,), "norm weights stored less one"),
    "quick_geglu": ((False,), "the gated quick GELU"),
    "glu_linear_offset": ((0, 0.0, None), "an offset in the gated activation"),
    "activation_func_clamp_value": ((None,), "clamped activations"),
    "softmax_type": (("vanilla", None), "a softmax with a sink"),
    "qk_l2_norm": ((False,), "queries and keys normalized without weights"),
    "attention_output_gate": ((False,), "a gate on the attention's output"),
    "no_rope_freq": ((None,), "layers without positions"),
    "use_mup": ((False,), "maximal-update scaling"),
    "mrope_section": ((None,), "multimodal rotary positions"),
    "moe_mlp_glu_interleave_size": ((None,), "gate and up rows in turns"),
    "retro_add_retriever": ((False,), "retrieval (RETRO)"),
}
"""Argument -> values that our families mean, and what another one stands for."""

MOE_KEYS = (
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_z_loss_coeff",
    "moe_token_drop_policy",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_latent_size",
    "moe_input_jitter_eps",
)
"""Arguments that are keys of [model.moe] as they are."""

TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LEARNED = "learned_absolute"


@dataclass(frozen=True)
class Arguments:
    """The attributes of Megatron's Namespace, of the file `origin`."""

    values: Mapping[str, Any]
    origin: Path

    def get(self, name: str, default: Any = None) -> Any:
        """The argument, or `default` where a version does not have it or it is None."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, *names: str) -> Any:
        """The first of the arguments that is there. Raises CheckpointError when none is."""
        for name in names:
            if (value := self.values.get(name)) is not None:
                return value
        raise CheckpointError(f"{self.origin}: its args do not have {' or '.join(names)}")

    @property
    def tensor_parallel(self) -> int:
        return int(self.get("tensor_model_parallel_size", self.get("model_parallel_size", 1)))

    @property
    def pipeline_parallel(self) -> int:
        return int(self.get("pipeline_model_parallel_size", 1))

    @property
    def expert_parallel(self) -> int:
        return int(self.get("expert_model_parallel_size", 1))

    @property
    def expert_tensor_parallel(self) -> int:
        return int(self.get("expert_tensor_parallel_size", self.tensor_parallel))

    @property
    def untied(self) -> bool:
        return bool(self.get("untie_embeddings_and_output_weights", False))


def model_section(args: Arguments, names: Collection[str], vocab_size: int) -> dict[str, Any]:
    """The [model] section that computes what Megatron's model does. names: of the stored parameters, canonical.

    Raises ConfigError, naming the argument, for a model that no family of ours is.
    """
    _refuse_others(args)
    if any(".mixer." in name for name in names):
        raise ConfigError(f"{args.origin}: Mamba layers are not read from Megatron's formats")
    section = {**_shared(args), "vocab_size": vocab_size}
    if any(name.startswith("encoder.") for name in names):
        decoder = any(name.startswith("decoder.") for name in names)
        return section | (_t5(args, names) if decoder else _bert(args, names))
    return section | _decoder(args)


def _refuse_others(args: Arguments) -> None:
    for name, (allowed, meaning) in REQUIRED.items():
        if name in args.values and args.values[name] not in allowed:
            raise ConfigError(
                f"{args.origin}: {name}={args.values[name]!r} stands for {meaning}, which no model family reads from "
                f"Megatron's formats; it can be {' or '.join(repr(value) for value in allowed)}"
            )


def _shared(args: Arguments) -> dict[str, Any]:
    """What all families have."""
    hidden, heads = int(args.need("hidden_size")), int(args.need("num_attention_heads"))
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": int(args.get("ffn_hidden_size", 4 * hidden)),
        "norm_epsilon": float(args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5))),
        "attention_dropout": float(args.get("attention_dropout", 0.1)),
        "init_method_std": float(args.get("init_method_std", 0.02)),
        "make_vocab_size_divisible_by": int(args.get("make_vocab_size_divisible_by", 128)),
    }


def _activation(args: Arguments) -> str:
    """Megatron's fused bias and GELU is the tanh approximation, whatever `openai_gelu` says."""
    if args.get("swiglu", False):
        return "swiglu"
    if args.get("squared_relu", False):
        return "squared_relu"
    fused = args.get("bias_gelu_fusion", False) and args.get("add_bias_linear", True)
    return "gelu_tanh" if fused or args.get("openai_gelu", False) else "gelu"


def _head_size(args: Arguments) -> dict[str, int]:
    """kv_channels, where it is not what our families take for it."""
    size = int(args.need("hidden_size")) // int(args.need("num_attention_heads"))
    given = int(args.get("kv_channels", size))
    return {"kv_channels": given} if given != size else {}


LLAMA_LIKE: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "hidden_dropout": 0.0,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
}
"""Arguments of the models that our families llama, mistral and qwen are, and that Hugging Face has too."""
DEFAULTS: Mapping[str, Any] = {"normalization": "LayerNorm", "swiglu": False, "hidden_dropout": 0.1}
"""Megatron's own, where they are others."""


def _decoder(args: Arguments) -> dict[str, Any]:
    differing = [name for name, value in LLAMA_LIKE.items() if args.get(name, DEFAULTS.get(name, value)) != value]
    if _position_type(args) != "rope":
        differing.append("position_embedding_type")
    if args.get("add_bias_linear", True) and (args.get("qk_layernorm", False) or args.values.get("window_size")):
        differing.append("add_bias_linear")
    if not differing:
        return _llama_like(args)
    for name, off in (("use_rope_scaling", False), ("window_size", None), ("rotary_seq_len_interpolation_factor", 1)):
        if args.get(name, off) != off:
            wanted = ", ".join(f"{key}={value}" for key, value in LLAMA_LIKE.items())
            raise ConfigError(
                f"{args.origin}: {name}={args.values[name]!r} is read of models with rotary positions, {wanted}; "
                f"this one has {', '.join(f'{key}={args.values.get(key)}' for key in differing)}"
            )
    return _gpt(args)


def _gpt(args: Arguments) -> dict[str, Any]:
    bias = bool(args.get("add_bias_linear", True))
    section: dict[str, Any] = {
        "family": "gpt",
        **_depth_and_heads(args),
        "hidden_dropout": float(args.get("hidden_dropout", 0.1)),
        "activation": _activation(args),
        "position_embedding_type": _positions(args, (LEARNED, "rope", "none")),
        "normalization": _normalization(args),
        "qk_layernorm": bool(args.get("qk_layernorm", False)),
        "add_bias_linear": bias,
    }
    if not bias and args.get("add_qkv_bias", False):
        section["add_qkv_bias"] = True
    if section["position_embedding_type"] == LEARNED:
        section["max_position_embeddings"] = int(args.need("max_position_embeddings"))
    if section["position_embedding_type"] == "rope":
        section["rotary_base"] = float(args.get("rotary_base", 10000))
        section["rotary_percent"] = float(args.get("rotary_percent", 1.0))
        section["rotary_interleaved"] = bool(args.get("rotary_interleaved", False))
    return section


def _llama_like(args: Arguments) -> dict[str, Any]:
    section = {
        **_depth_and_heads(args),
        "max_position_embeddings": int(args.need("max_position_embeddings")),
        "rotary_base": float(args.get("rotary_base", 10000)),
        **_rope_scaling(args),
    }
    if args.get("add_bias_linear", True):
        return {"family": "llama", **section, "attention_bias": True, "mlp_bias": True}
    biased, normalized = bool(args.get("add_qkv_bias", False)), bool(args.get("qk_layernorm", False))
    window = _window(args)
    if biased or normalized:
        extra = {} if window is None else {"sliding_window": window}
        return {"family": "qwen", **section, "add_qkv_bias": biased, "qk_layernorm": normalized, **extra}
    if window is not None:
        return {"family": "mistral", **section, "sliding_window": window}
    return {"family": "llama", **section}


def _rope_scaling(args: Arguments) -> dict[str, Any]:
    """Llama 3.1's, whose constants but the factor Megatron fixes, or a division of all positions."""
    factor = args.get("rotary_seq_len_interpolation_factor", 1)
    if args.get("use_rope_scaling", False):
        return {
            "rope_scaling_type": "llama3",
            "rope_scaling_factor": float(args.get("rope_scaling_factor", 8.0)),
            "original_max_position_embeddings": 8192,
            "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": 4.0,
        }
    return {} if factor == 1 else {"rope_scaling_type": "linear", "rope_scaling_factor": float(factor)}


def _window(args: Arguments) -> int | None:
    """Positions that a query sees, itself included; Megatron's window_size counts those before and those after it."""
    window = args.values.get("window_size")
    if window is None:
        return None
    if len(window) != 2 or window[1] not in (0, -1) or args.values.get("window_attn_skip_freq") is not None:
        raise ConfigError(
            f"{args.origin}: window_size={window!r} with window_attn_skip_freq="
            f"{args.values.get('window_attn_skip_freq')!r} is not read; every layer needs the window (left, 0)"
        )
    return int(window[0]) + 1


def _depth_and_heads(args: Arguments) -> dict[str, Any]:
    section: dict[str, Any] = {
        "num_layers": int(args.need("num_layers", "encoder_num_layers")),
        **_head_size(args),
        "untie_embeddings_and_output_weights": args.untied,
        **_moe(args),
    }
    if args.get("group_query_attention", False):
        section["num_query_groups"] = int(args.need("num_query_groups"))
    return section


def _position_type(args: Arguments) -> str:
    given = args.get("position_embedding_type", LEARNED)
    if args.get("use_rotary_position_embeddings", False):
        return "rope"
    return "none" if given == LEARNED and not args.get("add_position_embedding", True) else str(given)


def _positions(args: Arguments, allowed: tuple[str, ...]) -> str:
    given = _position_type(args)
    if given not in allowed:
        raise ConfigError(
            f"{args.origin}: position_embedding_type={given!r} is not read; it can be {', '.join(allowed)}"
        )
    return given


def _normalization(args: Arguments) -> str:
    given = args.get("normalization", "LayerNorm")
    if given not in ("LayerNorm", "RMSNorm"):
        raise ConfigError(f"{args.origin}: normalization={given!r} is not read; it can be LayerNorm or RMSNorm")
    return str(given)


def _moe(args: Arguments) -> dict[str, Any]:
    if not args.get("num_experts", 0):
        return {}
    options = {key: args.values[key] for key in MOE_KEYS if args.values.get(key) is not None}
    options |= {"num_experts": int(args.values["num_experts"]), "moe_layer_freq": _frequency(args)}
    if args.get("moe_router_score_function", "softmax") == "softmax":
        options["moe_router_pre_softmax"] = bool(args.get("moe_router_pre_softmax", False))
    if args.get("moe_router_enable_expert_bias", False):
        options["moe_router_bias_update_rate"] = float(args.get("moe_router_bias_update_rate", 1e-3))
    return {"moe": options | _balancing(args)}


def _frequency(args: Arguments) -> int | str:
    given = args.get("moe_layer_freq", 1)
    return str([int(entry) for entry in given]).replace(" ", "") if isinstance(given, list | tuple) else given


def _balancing(args: Arguments) -> dict[str, Any]:
    """One type or several, each with its coefficient."""
    types = args.get("moe_router_load_balancing_type", "aux_loss")
    types = [types] if isinstance(types, str) else list(types)
    coefficients = args.get("moe_aux_loss_coeff", 0.0)
    coefficients = [coefficients] * len(types) if isinstance(coefficients, int | float) else list(coefficients)
    losses = [float(value) for kind, value in zip(types, coefficients, strict=False) if kind.endswith("loss")]
    options: dict[str, Any] = {"moe_router_load_balancing_type": types}
    return options | ({"moe_aux_loss_coeff": losses} if losses else {})


def _bert(args: Arguments, names: Collection[str]) -> dict[str, Any]:
    return {
        "family": "bert",
        "activation": _activation(args),
        "hidden_dropout": float(args.get("hidden_dropout", 0.1)),
        "num_layers": int(args.need("encoder_num_layers", "num_layers")),
        "max_position_embeddings": int(args.need("max_position_embeddings")),
        "num_tokentypes": 2 if "embedding.tokentype_embeddings.weight" in names else 0,
        "add_lm_head": "lm_head.dense.weight" in names,
        "bert_binary_head": "binary_head.weight" in names,
        "add_pooler": "pooler.dense.weight" in names,
    }


def _t5(args: Arguments, names: Collection[str]) -> dict[str, Any]:
    positions = _positions(args, (LEARNED, "relative"))
    section: dict[str, Any] = {
        "family": "t5",
        "activation": _activation(args),
        "hidden_dropout": float(args.get("hidden_dropout", 0.1)),
        "num_layers": int(args.need("encoder_num_layers", "num_layers")),
        "decoder_num_layers": int(args.get("decoder_num_layers", args.need("encoder_num_layers", "num_layers"))),
        **_head_size(args),
        "position_embedding_type": positions,
        "normalization": _normalization(args),
        "add_bias_linear": bool(args.get("add_bias_linear", True)),
        "scale_attention_scores": True,
        "untie_embeddings_and_output_weights": args.untied,
    }
    if positions == LEARNED:
        section["max_position_embeddings"] = int(args.need("max_position_embeddings"))
    else:
        section["relative_attention_num_buckets"] = int(args.get("relative_attention_num_buckets", 32))
        section["relative_attention_max_distance"] = int(args.get("relative_attention_max_distance", 128))
    if not args.untied:
        section |= {"scale_output": False, "add_output_bias": "output_layer.bias" in names}
    return section


# -- the other sections ------------------------------------------------------------------------------


def run_sections(args: Arguments) -> dict[str, dict[str, Any]]:
    """Sections beside [model] that say how the run was trained, as far as Megatron's arguments and ours agree."""
    sections: dict[str, dict[str, Any]] = {
        "data": _given(args, seq_length="seq_length"),
        "train": _given(
            args,
            micro_batch_size="micro_batch_size",
            global_batch_size="global_batch_size",
            train_samples="train_samples",
            train_iters="train_iters",
            seed="seed",
        ),
        "precision": {"dtype": DTYPE_NAMES.get(params_dtype(args), "fp32")},
        "optimizer": _optimizer(args),
        "lr_schedule": _schedule(args),
        "tokenizer": _tokenizer(args),
    }
    if "train_samples" in sections["train"]:
        sections["train"].pop("train_iters", None)
    return {name: values for name, values in sections.items() if values}


def params_dtype(args: Arguments) -> torch.dtype:
    """Of the weights while they are trained."""
    given = args.values.get("params_dtype")
    if isinstance(given, torch.dtype):
        return given
    return torch.bfloat16 if args.get("bf16", False) else torch.float16 if args.get("fp16", False) else torch.float32


def _given(args: Arguments, **keys: str) -> dict[str, Any]:
    """Our key -> the argument of that name, where it is set."""
    return {ours: args.values[theirs] for ours, theirs in keys.items() if args.values.get(theirs) is not None}


def _optimizer(args: Arguments) -> dict[str, Any]:
    kind = args.get("optimizer", "adam")
    if kind not in ("adam", "sgd"):
        return {}
    own = ("adam_beta1", "adam_beta2", "adam_eps") if kind == "adam" else ("sgd_momentum",)
    names = ("lr", "min_lr", "weight_decay", "clip_grad", *own)
    numbers = {name: float(args.values[name]) for name in names if args.values.get(name) is not None}
    return {"optimizer": kind, **numbers}


def _schedule(args: Arguments) -> dict[str, Any]:
    style = args.get("lr_decay_style")
    if style is None:
        return {}
    by_samples = args.values.get("train_samples") is not None
    section: dict[str, Any] = {"lr_decay_style": style, "lr_warmup_init": float(args.get("lr_warmup_init", 0.0))}
    if (fraction := args.values.get("lr_warmup_fraction")) is not None:
        section["lr_warmup_fraction"] = float(fraction)
    kinds = ["warmup", "decay"] + (["wsd_decay"] if style == "WSD" else [])
    for kind in kinds:
        key = f"lr_{kind}_{'samples' if by_samples else 'iters'}"
        if args.get(key, 0) and not (kind == "warmup" and fraction is not None):
            section[key] = int(args.values[key])
    if style == "WSD":
        section["lr_wsd_decay_style"] = args.get("lr_wsd_decay_style", "exponential")
    return section


def _tokenizer(args: Arguments) -> dict[str, Any]:
    kind = args.get("tokenizer_type")
    if kind is None:
        return {}
    if kind == "NullTokenizer":
        return {"tokenizer_type": kind, "vocab_size": int(args.need("vocab_size", "padded_vocab_size"))}
    return {"tokenizer_type": kind, **{name: args.values[name] for name in TOKENIZER_FILES if args.get(name)}}
