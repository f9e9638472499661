"""Which family a model of Megatron's is, and which arguments a family has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mt_ckpt.megatron.arguments import refuse_others
from mt_core.config.schema import Config
from mt_core.config_map import MEGATRON_FORMAT, MegatronArguments, MegatronMap
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS

ORDINARY: Mapping[str, Any] = {"is_hybrid_model": False, "multi_latent_attention": False}
"""Arguments that decide how parameters are called, of a family that says nothing of them."""
TOWER = "vision_model."


def refuse_images(origin: Path, names: Iterable[str], host: PluginHost) -> None:
    """Raises ConfigError, saying why, for a checkpoint with an image tower. names: of its tensors."""
    if tower := next((name for name in names if name.startswith(TOWER)), None):
        llava = _maps(host).get("llava")
        reason = f": {llava.unsupported}" if llava is not None and llava.unsupported else ""
        raise ConfigError(f"{origin}: has {tower}, of a model with an image tower, which is not read{reason}")


def model_section(args: MegatronArguments, names: Collection[str], vocab_size: int, host: PluginHost) -> dict[str, Any]:
    """The [model] section that computes what Megatron's model does. names: of the stored parameters, canonical.

    Raises ConfigError, naming the argument, for a model that no installed family is, and for one that several take.
    """
    maps = _maps(host)
    # Families with arguments of their own are asked first.
    special = {
        name: section for name, megatron_map in maps.items() if (section := _own_section(megatron_map, args, names))
    }
    if name := _only(args, special):
        return {"family": name, **special[name], "vocab_size": vocab_size}
    name = _only(
        args,
        [
            name
            for name, megatron_map in maps.items()
            if megatron_map.takes is not None and megatron_map.takes(args, names)
        ],
    )
    if name is None:
        raise ConfigError(f"{args.origin}: no installed family reads this model (pip install mt-models)")
    refuse_others(args, maps[name].reads)
    read = maps[name].section
    assert read is not None
    return {"family": name, **(read(args, names) or {}), "vocab_size": vocab_size}


def _own_section(megatron_map: MegatronMap, args: MegatronArguments, names: Collection[str]) -> dict[str, Any] | None:
    return (
        megatron_map.section(args, names) if megatron_map.section is not None and megatron_map.takes is None else None
    )


def _only(args: MegatronArguments, families: Collection[str]) -> str | None:
    if len(families) > 1:
        raise ConfigError(f"{args.origin}: the families {' and '.join(families)} both take this model for theirs")
    return next(iter(families), None)


def require_writable(family: str, host: PluginHost) -> None:
    """Raises ConfigError, saying why, for a family that Megatron does not have."""
    maps = _maps(host)
    megatron_map = maps.get(family)
    if megatron_map is not None and megatron_map.arguments is not None:
        return
    reason = f": {megatron_map.unsupported}" if megatron_map is not None and megatron_map.unsupported else ""
    able = ", ".join(name for name, other in maps.items() if other.arguments is not None)
    raise ConfigError(f"model.family={family} cannot be written as Megatron's arguments{reason}; these can: {able}")


def model_arguments(
    config: Config, parameters: Collection[str], kept: Mapping[str, Any], host: PluginHost
) -> dict[str, Any]:
    """The other way, of a family that `require_writable` takes. Raises ConfigError, naming the key, for a model that
    Megatron does not have."""
    write = _maps(host)[config.model.family].arguments
    assert write is not None
    return {**ORDINARY, **write(config.model, parameters, kept)}


def _maps(host: PluginHost) -> dict[str, MegatronMap]:
    """The declarations of all installed families that have one."""
    return {
        spec.name: spec.name_maps[MEGATRON_FORMAT].load() for spec in host[MODELS] if MEGATRON_FORMAT in spec.name_maps
    }
