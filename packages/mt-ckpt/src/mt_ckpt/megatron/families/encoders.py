"""BERT and T5."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.families.shared import (
    LEARNED,
    activation,
    depth_arguments,
    head_size,
    normalization,
    position_arguments,
    positions,
    require,
    shared_arguments,
    shared_section,
)
from mt_core.errors import ConfigError


def bert_section(args: Arguments, names: Collection[str]) -> dict[str, Any]:
    return {
        "family": "bert",
        **shared_section(args),
        "activation": activation(args),
        "hidden_dropout": float(args.get("hidden_dropout", 0.1)),
        "num_layers": int(args.need("encoder_num_layers", "num_layers")),
        "max_position_embeddings": int(args.need("max_position_embeddings")),
        "num_tokentypes": 2 if "embedding.tokentype_embeddings.weight" in names else 0,
        "add_lm_head": "lm_head.dense.weight" in names,
        "bert_binary_head": "binary_head.weight" in names,
        "add_pooler": "pooler.dense.weight" in names,
    }


def t5_section(args: Arguments, names: Collection[str]) -> dict[str, Any]:
    kind = positions(args, (LEARNED, "relative"))
    section: dict[str, Any] = {
        "family": "t5",
        **shared_section(args),
        "activation": activation(args),
        "hidden_dropout": float(args.get("hidden_dropout", 0.1)),
        "num_layers": int(args.need("encoder_num_layers", "num_layers")),
        "decoder_num_layers": int(args.get("decoder_num_layers", args.need("encoder_num_layers", "num_layers"))),
        **head_size(args),
        "position_embedding_type": kind,
        "normalization": normalization(args),
        "add_bias_linear": bool(args.get("add_bias_linear", True)),
        "scale_attention_scores": True,
        "untie_embeddings_and_output_weights": args.untied,
    }
    if kind == LEARNED:
        section["max_position_embeddings"] = int(args.need("max_position_embeddings"))
    else:
        section["relative_attention_num_buckets"] = int(args.get("relative_attention_num_buckets", 32))
        section["relative_attention_max_distance"] = int(args.get("relative_attention_max_distance", 128))
    # Of tied tables only: Transformers' T5 multiplies the decoder's output by hidden_size ** -0.5 there, Megatron does
    # not.
    if not args.untied:
        section |= {"scale_output": False, "add_output_bias": "output_layer.bias" in names}
    return section


def bert_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    require(model, "layernorm_placement", ("pre",))
    if model.num_tokentypes not in (0, 2):
        raise ConfigError(f"model.num_tokentypes={model.num_tokentypes}: Megatron's BERT has 2 or none (0)")
    return {
        **shared_arguments(model),
        **depth_arguments(model),
        "max_position_embeddings": model.max_position_embeddings,
        **position_arguments(LEARNED),
        "qk_layernorm": False,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
        "bert_binary_head": model.bert_binary_head,
    }


def t5_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    require(model, "scale_attention_scores", (True,))
    if model.output_scale != 1.0:
        raise ConfigError("model.scale_output=true: Megatron's T5 does not scale its output; it can be false")
    return {
        **shared_arguments(model),
        **depth_arguments(model),
        "decoder_num_layers": model.decoder_layers,
        "max_position_embeddings": model.max_position_embeddings or kept.get("max_position_embeddings") or 512,
        **position_arguments(model.position_embedding_type),
        "relative_attention_num_buckets": model.relative_attention_num_buckets,
        "relative_attention_max_distance": model.relative_attention_max_distance,
        "qk_layernorm": False,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_bias_linear,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
    }
