"""Megatron's arguments for T5."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config_map import MegatronArguments, MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.megatron import (
    LEARNED,
    activation,
    depth_arguments,
    head_size,
    kind_of_model,
    normalization,
    position_arguments,
    positions,
    require,
    shared_arguments,
    shared_section,
)


def is_encoder_decoder(args: MegatronArguments, names: Collection[str]) -> bool:
    return kind_of_model(args, names) == "encoder_decoder"


def t5_section(args: MegatronArguments, names: Collection[str]) -> dict[str, Any]:
    kind = positions(args, (LEARNED, "relative"))
    keys: dict[str, Any] = {
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
        keys["max_position_embeddings"] = int(args.need("max_position_embeddings"))
    else:
        keys["relative_attention_num_buckets"] = int(args.get("relative_attention_num_buckets", 32))
        keys["relative_attention_max_distance"] = int(args.get("relative_attention_max_distance", 128))
    # Of tied tables only: Transformers' T5 multiplies the decoder's output by hidden_size ** -0.5 there, Megatron does
    # not.
    if not args.untied:
        keys |= {"scale_output": False, "add_output_bias": "output_layer.bias" in names}
    return keys


def t5_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    require(model, "scale_attention_scores", (True,))
    require(model, "relative_attention_bias_per_layer", (False,))
    if model.output_scale != 1.0:
        key = "scale_untied_output" if model.untie_embeddings_and_output_weights else "scale_output"
        raise ConfigError(f"model.{key}=true: Megatron's T5 does not scale its output; it can be false")
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


MEGATRON = MegatronMap(arguments=t5_arguments, takes=is_encoder_decoder, section=t5_section)
