"""The configuration of mt that a program's objects stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin, Sections
from mt_accelerate.optimizers import optimizer_keys
from mt_core.errors import ConfigError

ROPE = "rope"
DATASET_NAMES = {"bert": "bert", "t5": "t5"}
"""Model family -> Megatron's data set for it; others take that of GPT."""


def training_sections(
    model: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    plugin: MegatronLMPlugin,
    optimizer: Any,
    *,
    mixed_precision: str,
    micro_batch_size: int,
    dp_size: int,
    seed: int,
    device: str,
    schedule: Sections,
    data: Mapping[str, Any],
) -> Sections:
    """All sections. model, tokenizer: those of the transformers model. schedule, data: as the program gives them.

    Raises ConfigError for a field of the plugin that contradicts the model, and an optimizer that cannot be followed.
    """
    own = plugin.sections(mixed_precision)
    batch = {
        "micro_batch_size": micro_batch_size,
        "global_batch_size": micro_batch_size * plugin.num_micro_batches * dp_size,
        "seed": seed,
        "device": device,
    }
    return {
        **own,
        **schedule,
        "model": model_section(model, plugin),
        "tokenizer": dict(tokenizer),
        "data": {**own.get("data", {}), **data},
        "train": {**own.get("train", {}), **schedule.get("train", {}), **batch},
        "optimizer": {**own.get("optimizer", {}), **optimizer_keys(optimizer), "min_lr": plugin.min_lr},
    }


def model_section(model: Mapping[str, Any], plugin: MegatronLMPlugin) -> dict[str, Any]:
    """The model's own keys, with the plugin's dropout where the family has it."""
    asked, rotary = plugin.use_rotary_position_embeddings, model.get("position_embedding_type") == ROPE
    if asked is not None and "position_embedding_type" in model and asked != rotary:
        raise ConfigError(
            f"MegatronLMPlugin(use_rotary_position_embeddings={asked}) contradicts the model, whose positions are "
            f"{model['position_embedding_type']}; leave the field out"
        )
    section = {key: value for key, value in model.items() if value is not None}
    for key in ("attention_dropout", "hidden_dropout"):
        if key in model:
            section[key] = getattr(plugin, key)
        elif getattr(plugin, key):
            raise ConfigError(
                f"MegatronLMPlugin({key}={getattr(plugin, key):g}): model.family={model['family']} has none"
            )
    return section


def data_parallel_size(plugin: MegatronLMPlugin) -> int:
    """Of this world. Raises ConfigError when the layout does not fit into it."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    shared = plugin.tp_degree * plugin.pp_degree * plugin.context_parallel_size
    if world % shared:
        raise ConfigError(
            f"{world} processes are no multiple of tp_degree={plugin.tp_degree} x pp_degree={plugin.pp_degree} x "
            f"context_parallel_size={plugin.context_parallel_size} = {shared}; start a multiple of it"
        )
    return world // shared


def dataset_section(arguments: Mapping[str, Any], family: str) -> dict[str, Any]:
    """[data] of MegatronLMDummyDataLoader(...)."""
    keys = {key: value for key, value in arguments.items() if value is not None and key != "micro_batch_size"}
    if "splits_string" in keys:
        keys["split"] = keys.pop("splits_string")
    paths = keys.get("data_path")
    if isinstance(paths, str):
        keys["data_path"] = [paths]
    return {"dataset_type": DATASET_NAMES.get(family, "gpt"), **keys}
