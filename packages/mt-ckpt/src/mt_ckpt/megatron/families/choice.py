"""Which family a model of Megatron's is, and which arguments a family has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mt_ckpt.megatron.argument_list import refuse_others
from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.families import encoders, gpt, gpt_oss, latent, rotary, state_space
from mt_core.config.schema import Config
from mt_core.errors import ConfigError

Write = Callable[[Any, Collection[str], Mapping[str, Any]], dict[str, Any]]
"""(model configuration, canonical parameters, arguments that came from Megatron) -> arguments"""
WRITERS: Mapping[str, Write] = {
    "gpt": gpt.gpt_arguments,
    "llama": rotary.rotary_arguments,
    "mistral": rotary.rotary_arguments,
    "qwen": rotary.rotary_arguments,
    "mixtral": rotary.rotary_arguments,
    "qwen_moe": rotary.rotary_arguments,
    "granite_moe": rotary.granite_arguments,
    "gpt_oss": gpt_oss.gpt_oss_arguments,
    "deepseek": latent.latent_arguments,
    "mamba": state_space.mamba_arguments,
    "hybrid": state_space.hybrid_arguments,
    "bert": encoders.bert_arguments,
    "t5": encoders.t5_arguments,
}
HEADS = "Megatron-Core has no heads that choose a class or a text"
REASONS: Mapping[str, str] = {
    "gemma": "Megatron has its zero-centered norms (apply_layernorm_1p), but no norms behind attention and "
    "feed-forward, no gated tanh GELU, no rotary base for each kind of layer and no scale on word vectors",
    "olmoe": "Megatron normalizes queries and keys head by head, this family over all heads together",
    "retro": "Megatron-Core removed RETRO in January 2026, and its chunked attention had other parameters",
    "biencoder": "Megatron-Core never had two encoders in one checkpoint; Megatron-LM removed its biencoder",
    "vision": "Megatron-Core has image towers only within a model of images and text",
    "llava": "Megatron's models of images and text are made by its example scripts, in sizes that these know by name; "
    "all their projections have a norm in front or another inner width than the decoder's, and which id stands for an "
    "image only their tokenizer says",
    "bert_classification": HEADS,
    "bert_multiple_choice": HEADS,
    "gpt_classification": HEADS,
    "gpt_multiple_choice": HEADS,
    "llama_classification": HEADS,
    "llama_multiple_choice": HEADS,
}
"""Families of ours that Megatron's formats have no place for."""
TOWER = "vision_model."


def refuse_images(origin: Path, names: Iterable[str]) -> None:
    """Raises ConfigError, saying why, for a checkpoint with an image tower. names: of its tensors."""
    if tower := next((name for name in names if name.startswith(TOWER)), None):
        raise ConfigError(
            f"{origin}: has {tower}, of a model with an image tower, which is not read: {REASONS['llava']}"
        )


def model_section(args: Arguments, names: Collection[str], vocab_size: int) -> dict[str, Any]:
    """The [model] section that computes what Megatron's model does. names: of the stored parameters, canonical.

    Raises ConfigError, naming the argument, for a model that no family of ours is.
    """
    return {**_section(args, names), "vocab_size": vocab_size}


def _section(args: Arguments, names: Collection[str]) -> dict[str, Any]:
    if state_space.is_hybrid(args, names):
        refuse_others(args, state_space.READ)
        return state_space.hybrid_section(args)
    if args.get("multi_latent_attention", False):
        refuse_others(args, latent.READ)
        return latent.latent_section(args)
    if gpt_oss.has_sinks(args):
        refuse_others(args, gpt_oss.READ)
        return gpt_oss.gpt_oss_section(args)
    refuse_others(args)
    if any(name.startswith("encoder.") for name in names):
        decoder = any(name.startswith("decoder.") for name in names)
        return encoders.t5_section(args, names) if decoder else encoders.bert_section(args, names)
    if differing := rotary.differing(args):
        rotary.require_no_extras(args, differing)
        return gpt.gpt_section(args)
    return rotary.rotary_section(args)


def require_writable(family: str) -> None:
    """Raises ConfigError, saying why, for a family that Megatron does not have."""
    if family in WRITERS:
        return
    reason = f": {REASONS[family]}" if family in REASONS else ""
    raise ConfigError(
        f"model.family={family} cannot be written as Megatron's arguments{reason}; these can: {', '.join(WRITERS)}"
    )


def model_arguments(config: Config, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    """The other way, of a family that `require_writable` takes. Raises ConfigError, naming the key, for a model that
    Megatron does not have."""
    return WRITERS[config.model.family](config.model, parameters, kept)
