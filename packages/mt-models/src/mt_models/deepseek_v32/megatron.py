"""Megatron's arguments for DeepSeek-V3.2 and GLM-5: those of DeepSeek-V3, and the variant of attention "dsa"."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config_map import MegatronArguments, MegatronMap
from mt_models.blocks.megatron import kind_of_model, norm_epsilon, require
from mt_models.deepseek.megatron import READS, SPARSE, VARIANT, deepseek_arguments, deepseek_section

SAME: Mapping[str, Any] = {
    "dsa_indexer_n_heads": 64,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048,
    "dsa_indexer_loss_coeff": 0.0,
    "dsa_indexer_use_sparse_loss": False,
    "dsa_indexer_topk_freq": 1,
    "dsa_indexer_skip_topk_offset": 0,
    "dsa_indexer_rope_interleaved": False,
}
"""Arguments that are keys of the same name, with what is taken where a checkpoint does not say them."""
EPSILON = "dsa_indexer_k_norm_epsilon"


def has_indexers(args: MegatronArguments, names: Collection[str]) -> bool:
    return kind_of_model(args, names) == "latent" and args.get(VARIANT) == SPARSE


def section(args: MegatronArguments, names: Collection[str]) -> dict[str, Any]:
    indexer_values = {key: args.get(key, default) for key, default in SAME.items()}
    indexer_values["dsa_indexer_loss_coeff"] = float(indexer_values["dsa_indexer_loss_coeff"] or 0.0)
    if not indexer_values["dsa_indexer_loss_coeff"]:
        # Without a coefficient there is no loss that it would be about.
        indexer_values["dsa_indexer_use_sparse_loss"] = False
    epsilon = args.get(EPSILON)
    return {
        **deepseek_section(args, names),
        **indexer_values,
        EPSILON: norm_epsilon(args) if epsilon is None else float(epsilon),
    }


def arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    require(model, "dsa_dense_warmup", (False,))
    return {
        **deepseek_arguments(model, parameters, kept),
        VARIANT: SPARSE,
        **{key: getattr(model, key) for key in SAME},
        EPSILON: model.dsa_indexer_k_norm_epsilon,
        # Of queries and keys by a Hadamard matrix, which cancels: DeepSeek-V3.2 has it, GLM-5 has not.
        "dsa_indexer_rotate_activation": not model.dsa_indexer_rope_interleaved,
    }


MEGATRON = MegatronMap(arguments=arguments, takes=has_indexers, section=section, reads=(*READS, VARIANT))
