"""The declarations of model families for GGUF (`name_maps["gguf"]`), which mt_models.gguf.GGUFFamily holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from mt_ckpt.gguf.metadata import ArchitectureMetadata
from mt_core.config_map import require_known
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS

FORMAT = "gguf"


class KeyOfMetadata(Protocol):
    """theirs: behind `<architecture>.`; ours: in config.json."""

    theirs: str
    ours: str
    kind: type
    default: Any


class Architecture(Protocol):
    """One `general.architecture`, as one type of config.json (mt_models.gguf.GGUFArchitecture)."""

    name: str
    model_type: str
    keys: tuple[KeyOfMetadata, ...]
    predicts: bool
    """Whether the architecture has layers of multi-token prediction."""

    @property
    def read(self) -> Callable[[Any], dict[str, Any]]: ...

    @property
    def write(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]: ...

    @property
    def fits(self) -> Callable[[Any], bool]: ...

    @property
    def further(self) -> Callable[[Mapping[str, Any]], Mapping[str, Tensor]]: ...


class GGUFFamilyLike(Protocol):
    family: str
    architectures: tuple[Architecture, ...]

    @property
    def name_map(self) -> Callable[[Any], NameMap]: ...

    @property
    def copies(self) -> Callable[[Any], Mapping[str, str]]: ...

    def spelling(self, config: Any, name: str) -> str: ...

    def architecture_for(self, external: Mapping[str, Any]) -> Architecture: ...


def families(host: PluginHost) -> Iterator[GGUFFamilyLike]:
    for spec in host[MODELS]:
        if FORMAT in spec.name_maps:
            yield spec.name_maps[FORMAT].load()


def family_to_write(name: str, host: PluginHost) -> GGUFFamilyLike:
    """The declaration of `model.family=name`. Raises ConfigError when the family has none."""
    spec = host[MODELS].get(name, key="model.family")
    if FORMAT not in spec.name_maps:
        able = ", ".join(sorted(other.name for other in host[MODELS] if FORMAT in other.name_maps))
        raise ConfigError(f"model.family={name} cannot be written as GGUF; these can: {able}")
    family: GGUFFamilyLike = spec.name_maps[FORMAT].load()
    return family


def family_of_file(metadata: ArchitectureMetadata, host: PluginHost) -> tuple[GGUFFamilyLike, Architecture]:
    """Family that the file fits, among those of its architecture. Raises ConfigError for an unknown one."""
    pairs = [(family, architecture) for family in families(host) for architecture in family.architectures]
    name = metadata.architecture
    require_known("general.architecture", name, sorted({architecture.name for _, architecture in pairs}))
    able = [pair for pair in pairs if pair[1].name == name]
    fitting = [pair for pair in able if pair[1].fits(metadata)]
    return (fitting or able)[0]
