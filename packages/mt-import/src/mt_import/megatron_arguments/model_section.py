"""[model], from Megatron's arguments after its validation, as its checkpoints are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.families.choice import model_section as checkpoint_model_section
from mt_ckpt.megatron.families.encoders import bert_section
from mt_ckpt.megatron.families.gpt import gpt_section
from mt_core.config.layer_pattern import pattern_of
from mt_core.plugins import PluginHost
from mt_import.megatron_arguments.entry_scripts import EntryScript

MOE_TRAINING = ("moe_shared_expert_overlap", "moe_router_force_load_balancing")
"""Options of MoE models that concern training alone."""
DISPATCHERS: Mapping[str, str] = {"alltoall_seq": "alltoall"}
"""Megatron's name for a dispatcher -> ours, where it is another."""
SAME_MODEL: Mapping[str, Any] = {"apply_layernorm_1p": False}
"""Arguments that change what a checkpoint holds, and no number that is computed."""
RETRO: Mapping[str, str] = {
    "retro_num_neighbors": "retro_num_neighbors",
    "retro_num_retrieved_chunks": "retro_num_retrieved_chunks",
    "retro_encoder_layers": "retro_encoder_num_layers",
    "retro_encoder_hidden_dropout": "retro_encoder_hidden_dropout",
    "retro_encoder_attention_dropout": "retro_encoder_attention_dropout",
}
BIENCODER = ("biencoder_projection_dim", "biencoder_shared_query_context_model", "retriever_score_scaling")


def model_section(values: Mapping[str, Any], entry: EntryScript, source: str, host: PluginHost) -> dict[str, Any]:
    """The keys of [model] but vocab_size, which the tokenizer says. source: what messages call the arguments.

    Raises ConfigError, naming the argument, for a model that no installed family is.
    """
    # The reader of Megatron's checkpoints maps the same arguments: one table for both.
    section = _section(Arguments({**values, **SAME_MODEL}, Path(source)), entry, host)
    section.pop("vocab_size", None)
    if "moe" in section:
        section["moe"] = section["moe"] | _moe_training(values)
        if isinstance(layers := values["moe_layer_freq"], list) and "moe_layer_freq" in section["moe"]:
            # Back to the short form, which a reader of the file can check.
            section["moe"]["moe_layer_freq"] = pattern_of(list(map(bool, layers)))
    return section


def _section(args: Arguments, entry: EntryScript, host: PluginHost) -> dict[str, Any]:
    if entry.name == "retro":
        return {**gpt_section(args), "family": "retro", **{key: args.values[dest] for dest, key in RETRO.items()}}
    if entry.name == "ict":
        own = {dest: args.values[dest] for dest in BIENCODER}
        section = {**bert_section(args, entry.parameters), "family": "biencoder", **own}
        return {key: value for key, value in section.items() if not key.startswith(("add_", "bert_"))}
    return checkpoint_model_section(args, _parameters(args, entry), 1, host)


def _parameters(args: Arguments, entry: EntryScript) -> tuple[str, ...]:
    """Names that tell the parts of the model; of BERT's binary head and its pooler --bert-no-binary-head does."""
    if entry.name == "bert" and args.values["bert_binary_head"]:
        return (*entry.parameters, "binary_head.weight", "pooler.dense.weight")
    return entry.parameters


def _moe_training(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {dest: True for dest in MOE_TRAINING if values[dest]}
    kind = "flex" if values["moe_enable_deepep"] else values["moe_token_dispatcher_type"]
    found["moe_token_dispatcher_type"] = DISPATCHERS.get(kind, kind)
    if kind == "flex":
        found["moe_dispatcher_options"] = {"moe_flex_dispatcher_backend": values["moe_flex_dispatcher_backend"]}
    return found
