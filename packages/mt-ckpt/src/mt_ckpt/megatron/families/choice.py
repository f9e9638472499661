"""Which family a model of Megatron's is, and which arguments a family has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mt_ckpt.megatron.arguments import Arguments, refuse_others
from mt_ckpt.megatron.families import encoders, gpt, latent, rotary, state_space
from mt_core.config.schema import Config
from mt_core.config_map import MEGATRON_FORMAT, MegatronMap, WriteArguments, require_known
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS

WRITERS: Mapping[str, WriteArguments] = {
    "gpt": gpt.gpt_arguments,
    "rotary": rotary.rotary_arguments,
    "granite": rotary.granite_arguments,
    "gpt_oss": rotary.gpt_oss_arguments,
    "latent": latent.latent_arguments,
    "mamba": state_space.mamba_arguments,
    "hybrid": state_space.hybrid_arguments,
    "bert": encoders.bert_arguments,
    "t5": encoders.t5_arguments,
}
"""Sets of arguments that a family's MegatronMap can name."""
ORDINARY: Mapping[str, Any] = {"is_hybrid_model": False, "multi_latent_attention": False}
"""Arguments that decide how parameters are called, of a family that says nothing of them."""
TOWER = "vision_model."


def refuse_images(origin: Path, names: Iterable[str], host: PluginHost) -> None:
    """Raises ConfigError, saying why, for a checkpoint with an image tower. names: of its tensors."""
    if tower := next((name for name in names if name.startswith(TOWER)), None):
        llava = _maps(host).get("llava")
        reason = f": {llava.unsupported}" if llava is not None and llava.unsupported else ""
        raise ConfigError(f"{origin}: has {tower}, of a model with an image tower, which is not read{reason}")


def model_section(args: Arguments, names: Collection[str], vocab_size: int, host: PluginHost) -> dict[str, Any]:
    """The [model] section that computes what Megatron's model does. names: of the stored parameters, canonical.

    Families that read their own arguments are tried first. Raises ConfigError, naming the argument, for a model that no
    installed family is, and for one that several take.
    """
    readers = {name: found.section for name, found in _maps(host).items() if found.section is not None}
    sections = {name: section for name, read in readers.items() if (section := read(args.values, names))}
    if len(sections) > 1:
        raise ConfigError(f"{args.origin}: the families {' and '.join(sections)} both take this model for theirs")
    for name, section in sections.items():
        return {"family": name, **section, "vocab_size": vocab_size}
    return {**_section(args, names), "vocab_size": vocab_size}


def _section(args: Arguments, names: Collection[str]) -> dict[str, Any]:
    # From the special to the general: the first three kinds are named by arguments, which `refuse_others` requires off
    # afterwards. No argument names an encoder; the stored parameters show it.
    if state_space.is_hybrid(args, names):
        refuse_others(args, state_space.READ)
        return state_space.hybrid_section(args)
    if args.get("multi_latent_attention", False):
        refuse_others(args, latent.READ)
        return latent.latent_section(args)
    if rotary.has_sinks(args):
        refuse_others(args, rotary.READ)
        return rotary.gpt_oss_section(args)
    refuse_others(args)
    if any(name.startswith("encoder.") for name in names):
        decoder = any(name.startswith("decoder.") for name in names)
        return encoders.t5_section(args, names) if decoder else encoders.bert_section(args, names)
    # Both families compute a plain rotary decoder alike. The families of `rotary` are preferred, since Hugging Face's
    # formats have them under these names.
    if differing := rotary.differing(args):
        rotary.require_no_extras(args, differing)
        return gpt.gpt_section(args)
    return rotary.rotary_section(args)


def require_writable(family: str, host: PluginHost) -> None:
    """Raises ConfigError, saying why, for a family that Megatron does not have."""
    maps = _maps(host)
    found = maps.get(family)
    if found is not None and found.arguments is not None:
        return
    reason = f": {found.unsupported}" if found is not None and found.unsupported else ""
    able = ", ".join(name for name, other in maps.items() if other.arguments is not None)
    raise ConfigError(f"model.family={family} cannot be written as Megatron's arguments{reason}; these can: {able}")


def model_arguments(
    config: Config, parameters: Collection[str], kept: Mapping[str, Any], host: PluginHost
) -> dict[str, Any]:
    """The other way, of a family that `require_writable` takes. Raises ConfigError, naming the key, for a model that
    Megatron does not have."""
    written = _maps(host)[config.model.family].arguments
    assert written is not None
    if isinstance(written, str):
        return WRITERS[require_known("arguments", written, WRITERS)](config.model, parameters, kept)
    return {**ORDINARY, **written(config.model, parameters, kept)}


def _maps(host: PluginHost) -> dict[str, MegatronMap]:
    """The declarations of all installed families that have one."""
    return {
        spec.name: spec.name_maps[MEGATRON_FORMAT].load() for spec in host[MODELS] if MEGATRON_FORMAT in spec.name_maps
    }
