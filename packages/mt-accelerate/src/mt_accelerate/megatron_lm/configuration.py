"""The configuration of mt from a program's objects, and from Megatron's arguments in the plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mt_accelerate.megatron_lm.optimizers import OptimizerLike, optimizer_keys
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin, Sections
from mt_core.errors import ConfigError, Problems, did_you_mean
from mt_import.megatron_arguments.entry_scripts import BERT_TOKENIZER, GPT_TOKENIZER
from mt_import.megatron_arguments.table import REASONS, Argument, by_dest
from mt_import.readers.accelerate import KEYS

ROPE = "rope"
DATASET_NAMES = {"bert": "bert", "t5": "t5"}
"""Model family -> Megatron's data set for it; others take that of GPT."""

INDEXED = ("gpt", "bert", "t5")
"""Data sets that are made of token files."""


def training_sections(
    model: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    plugin: MegatronLMPlugin,
    optimizer: OptimizerLike,
    undecayed: Sequence[str] | None,
    *,
    mixed_precision: str,
    micro_batch_size: int,
    dp_size: int,
    seed: int,
    device: str,
    schedule: Sections,
    data: Mapping[str, Any],
) -> Sections:
    """All sections. model, tokenizer: those of the transformers model. undecayed: names that the program's groups do
    not decay. schedule, data: as the program gives them.

    Raises ConfigError for a field of the plugin that contradicts the model or the program, and an optimizer that cannot
    be followed.
    """
    of_plugin = plugin.sections(mixed_precision)
    others = other_sections(plugin.other_megatron_args or {}, model)
    batch = {
        "micro_batch_size": micro_batch_size,
        # Accelerate's rule: a program states the micro-batch (its loader's batch_size) and their number.
        "global_batch_size": micro_batch_size * plugin.num_micro_batches * dp_size,
        "seed": seed,
        "device": device,
    }
    of_program = merged(
        of_plugin,
        schedule,
        {
            "model": model_section(model, plugin),
            # A tokenizer of other_megatron_args replaces the model's as a whole: keys of two tokenizers do not mix.
            "tokenizer": {} if "tokenizer" in others else tokenizer,
            "data": {**_ids_of_program(data, others), **data},
            "train": batch,
            "parallel": _virtual_stages(plugin, model),
            "optimizer": _optimizer(optimizer, undecayed, plugin),
            **_logging(plugin),
        },
    )
    _require_no_contradiction(of_program, others)
    return merged(of_program, others)


def _ids_of_program(data: Mapping[str, Any], others: Sections) -> Mapping[str, Any]:
    """Token files are read by the program's model, whose tokenizer only the program has: without one in
    other_megatron_args their ids are taken as they are."""
    reads_files = "data_path" in data and data.get("dataset_type") in INDEXED
    return {"accept_tokenizer_mismatch": True} if reads_files and "tokenizer" not in others else {}


def _require_no_contradiction(of_program: Sections, others: Sections) -> None:
    """others: of other_megatron_args. Raises ConfigError for a key that the program gives another value."""
    for section, keys in others.items():
        for key, value in keys.items():
            # The same value twice is no contradiction, so that a launch script's arguments may be passed as they are.
            if (stated := of_program.get(section, {}).get(key, value)) != value:
                raise ConfigError(
                    f"other_megatron_args gives {section}.{key}={value!r}, and the program's model, optimizer, loaders "
                    f"and seed give {stated!r}; leave it out, and change it there"
                )


def merged(*parts: Mapping[str, Mapping[str, Any]]) -> Sections:
    """Sections with the keys of all parts; later ones win."""
    sections: Sections = {}
    for part in parts:
        for section, keys in part.items():
            sections[section] = {**sections.get(section, {}), **keys}
    return sections


def _optimizer(optimizer: OptimizerLike, undecayed: Sequence[str] | None, plugin: MegatronLMPlugin) -> dict[str, Any]:
    """[optimizer]. A weight decay that changes goes from the plugin's start_weight_decay to its end_weight_decay."""
    keys = {**optimizer_keys(optimizer), "min_lr": plugin.min_lr}
    if undecayed is not None:
        keys["no_weight_decay"] = list(undecayed)
    if plugin.weight_decay_incr_style != "constant":
        # The section has start_weight_decay and end_weight_decay then, from the plugin's own fields.
        del keys["weight_decay"]
    return keys


def _logging(plugin: MegatronLMPlugin) -> Sections:
    """[logging] and [tensorboard]."""
    if plugin.tensorboard_dir is None:
        return {}
    keys = {"trackers": ["tensorboard"], "log_interval": 1, "log_num_zeros_in_grad": plugin.set_all_logging_options}
    return {"logging": keys, "tensorboard": {"dir": plugin.tensorboard_dir}}


def _virtual_stages(plugin: MegatronLMPlugin, model: Mapping[str, Any]) -> dict[str, Any]:
    """[parallel] of an interleaved pipeline. Raises ConfigError for layers that stages of this size do not divide."""
    each, ranks = plugin.num_layers_per_virtual_pipeline_stage, plugin.pp_degree
    if each is None:
        return {}
    layers = int(model["num_layers"])
    # layers == ranks * each: one stage for each rank, which is no interleaving.
    if ranks == 1 or layers % (ranks * each) or layers == ranks * each:
        raise ConfigError(
            f"MegatronLMPlugin(num_layers_per_virtual_pipeline_stage={each}, pp_degree={ranks}): each rank of a "
            f"pipeline of two and more has as many stages, two or more; the model has {layers} layers"
        )
    return {
        "pipeline_schedule": "interleaved_1f1b",
        "virtual_pipeline_model_parallel_size": layers // ranks // each,
    }


def model_section(model: Mapping[str, Any], plugin: MegatronLMPlugin) -> dict[str, Any]:
    """The model's own keys, with the plugin's dropout where the family has it."""
    asked, rotary = plugin.use_rotary_position_embeddings, model.get("position_embedding_type") == ROPE
    if asked is not None and "position_embedding_type" in model and asked != rotary:
        raise ConfigError(
            f"MegatronLMPlugin(use_rotary_position_embeddings={asked}) contradicts the model, whose positions are "
            f"{model['position_embedding_type']}; leave the field out"
        )
    # Keys of a configuration cannot be None: an absent one has its default.
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
    """Data-parallel ranks of this world. Raises ConfigError when the layout does not fit into it."""
    # The expert-parallel size is no factor: ranks with other experts are data-parallel ranks of the other layers.
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
    # Accelerate's name; `split` is Megatron's.
    if "splits_string" in keys:
        keys["split"] = keys.pop("splits_string")
    paths = keys.get("data_path")
    if isinstance(paths, str):
        keys["data_path"] = [paths]
    return {"dataset_type": DATASET_NAMES.get(family, "gpt"), **keys}


# -- `MegatronLMPlugin(other_megatron_args=...)`, by the table of `mt import` ------------------------

EXPLICIT: Mapping[str, str] = {"exp_avg_dtype": "optimizer.exp_avg_dtype"}
"""Arguments that other fields of the plugin make a key of."""
FIELDS = {key: field for field, key in KEYS.items()}
"""Key -> the field of the plugin that sets it."""
TOKENIZERS = {"bert": BERT_TOKENIZER, "t5": BERT_TOKENIZER}
"""Model family -> the tokenizer that Megatron takes unless tokenizer_type is given; others take that of GPT."""


POSITIONS: Mapping[str, str] = {"absolute": "learned_absolute", "rotary": "rope"}
"""Accelerate's names of position embeddings -> those of the family; others are the same."""


def other_sections(arguments: Mapping[str, Any], model: Mapping[str, Any]) -> Sections:
    """arguments: attribute of Megatron's namespace -> value. model: its section. Raises one ConfigError that names each
    argument which Megatron does not have, which the model or a field of the plugin decides, or which has no effect
    here."""
    sections: Sections = {}
    problems = Problems()
    for dest, value in arguments.items():
        with problems.collect():
            if (stated := _stated(dest, model)) is not None:
                _require_stated(dest, value, stated)
                continue
            section, _, key = _key_of(dest).partition(".")
            sections.setdefault(section, {})[key] = value
    problems.stop_if_any()
    if "tokenizer" in sections:
        # Some argument of the tokenizer is given: its type is then Megatron's default for the script, as there.
        default = TOKENIZERS.get(str(model["family"]), GPT_TOKENIZER)
        sections["tokenizer"] = {"tokenizer_type": default, **sections["tokenizer"]}
    return sections


def _stated(dest: str, model: Mapping[str, Any]) -> str | None:
    """What the model has of those arguments that Accelerate's page passes for it; None for other arguments."""
    if dest == "position_embedding_type":
        return str(model.get(dest, "none"))
    if dest == "attention_head_type":
        return "multiquery" if model.get("num_query_groups") == 1 else "multihead"
    return None


def _require_stated(dest: str, value: Any, stated: str) -> None:
    """Raises ConfigError unless the model has it: mt trains the weights of the program's model."""
    if POSITIONS.get(value, value) != stated:
        raise ConfigError(
            f"other_megatron_args: {dest}={value!r}, and the model has {stated}; prepare a model that has it, "
            "BloomForCausalLM for alibi and GPTBigCodeForCausalLM for multiquery, or leave it out"
        )


def _key_of(dest: str) -> str:
    if dest in EXPLICIT:
        return EXPLICIT[dest]
    argument = by_dest().get(dest)
    if argument is None:
        raise ConfigError(f"other_megatron_args: Megatron has no {dest}{did_you_mean(dest, by_dest())}")
    # Only arguments that are one key with the same value: others need the whole launch script, which `mt import` reads.
    if argument.outcome != "copy" or len(argument.keys) != 1 or argument.keys[0].startswith("model."):
        raise ConfigError(f"other_megatron_args: {dest} cannot be given: {_reason(argument)}; leave it out")
    if (field := FIELDS.get(argument.keys[0])) is not None:
        raise ConfigError(f"other_megatron_args: {dest} is a field of the plugin; give MegatronLMPlugin({field}=...)")
    return argument.keys[0]


def _reason(argument: Argument) -> str:
    if argument.outcome == "refused":
        return argument.reason
    if argument.outcome == "none":
        return f"it has no effect here ({REASONS[argument.reason]})"
    if any(key.startswith("model.") for key in argument.keys):
        return "the transformers model decides it"
    return f"the plugin, the optimizer or the scheduler decides {', '.join(argument.keys)}"
