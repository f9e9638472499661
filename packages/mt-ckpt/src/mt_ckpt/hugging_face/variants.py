"""The maps of models that a section of the configuration changes (`mt_ckpt.variant_specs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_ckpt.hugging_face.family import Family, family_named, identify, read_config
from mt_ckpt.variant_specs import VARIANTS
from mt_core.config.schema import Config
from mt_core.config_map import installed_families, require_readable
from mt_core.plugins import PluginHost


def family_of_config(config: Config, host: PluginHost) -> Family:
    """The map of a model of this configuration. Raises ConfigError when its family has none."""
    family = family_named(config.model.family, host)
    for spec in host[VARIANTS]:
        variant: Family | None = spec.write.load()(family, config)
        if variant is not None:
            return variant
    return family


@dataclass(frozen=True)
class Identified:
    """family, model: as `identify` gives them. sections: of the configuration, beside [model]."""

    family: Family
    config: Config
    sections: Mapping[str, Any]


def identify_variant(external: Mapping[str, Any], names: Sequence[str], host: PluginHost) -> Identified:
    """The same as `identify`, with variants."""
    require_readable(external)
    families, _ = installed_families(host)
    for spec in host[VARIANTS]:
        read = spec.read.load()(families, external)
        if read is not None:
            family, sections = read
            return Identified(family, read_config(family, external, host), sections)
    family, config = identify(external, names, host)
    return Identified(family, config, {})
