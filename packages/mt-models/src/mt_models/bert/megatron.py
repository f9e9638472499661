"""Megatron's arguments for BERT."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config_map import MegatronArguments, MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.megatron import (
    LEARNED,
    activation,
    depth_arguments,
    kind_of_model,
    position_arguments,
    require,
    shared_arguments,
    shared_section,
)


def bert_section(args: MegatronArguments, names: Collection[str]) -> dict[str, Any]:
    return {
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


def is_encoder(args: MegatronArguments, names: Collection[str]) -> bool:
    return kind_of_model(args, names) == "encoder"


MEGATRON = MegatronMap(arguments=bert_arguments, takes=is_encoder, section=bert_section)
