"""Which model family an external configuration belongs to.

A family is an object that a model plugin registers under `name_maps["hf"]`; mt_models.hugging_face.HuggingFaceFamily
is the one that mt's own families use. What it has to provide is in `Family`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from mt_core.config.schema import Config
from mt_core.config_map import all_refuse, families_of
from mt_core.config_refusals import read_model
from mt_core.errors import CheckpointError, ConfigError
from mt_core.name_map import NameMap
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS

FORMAT = "hf"
PLAUSIBLE_LAYERS = 10_000
"""More layers are believed when the checkpoint has as many tensors."""


class Preprocessor(Protocol):
    """How images are made for a model: preprocessor_config.json, and the keys of [data] that do the same."""

    @property
    def write(self) -> Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]:
        """The file from the model's configuration and the keys of [data]."""
        ...

    @property
    def read(self) -> Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]:
        """The keys of [data] from the model's configuration and the file."""
        ...


class Family(Protocol):
    """How a model family stands in Hugging Face's format."""

    family: str
    model_types: Mapping[str, Any]
    architectures: Mapping[str, str]

    @property
    def preprocessor(self) -> Preprocessor | None:
        """None: the family takes no images."""
        ...

    def read_config(self, external: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of [model] from config.json."""
        ...

    def write_config(self, config: Any) -> dict[str, Any]:
        """config.json from the model's configuration."""
        ...

    def name_map(self, config: Any) -> NameMap: ...

    def copies(self, config: Any) -> Mapping[str, str]:
        """External names that repeat another one: name -> the one it repeats."""
        ...

    def spelling(self, config: Any, name: str) -> str:
        """The name that the map uses, from one that some version wrote."""
        ...


def family_named(name: str, host: PluginHost) -> Family:
    """The map of `model.family=name`. Raises ConfigError when the family has none."""
    spec = host[MODELS].get(name, key="model.family")
    if FORMAT not in spec.name_maps:
        able = ", ".join(sorted(other.name for other in host[MODELS] if FORMAT in other.name_maps))
        raise ConfigError(f"model.family={name} has no names in Hugging Face's format; these have: {able}")
    return spec.name_maps[FORMAT].load()


def identify(external: Mapping[str, Any], names: Iterable[str], host: PluginHost) -> tuple[Family, Config]:
    """The family of a config.json, and the configuration of its model.

    A `model_type` that several families know (a base model, the same with a head) goes to the one whose parameters
    are the given tensors; of several of these to the one that `architectures` names. Raises ConfigError for a type
    that none has or a configuration that cannot be, and CheckpointError when the tensors are those of none.
    """
    able, names = families_of(external, host), list(names)
    check_layers(external, len(names))
    # The names are checked where the reader is made; only a choice between families needs them here.
    if len(able) == 1:
        return able[0], _config_of_file(able[0], external, names, host)
    return _fitting(able, external, names, host)


def check_layers(external: Mapping[str, Any], num_tensors: int) -> None:
    """Raises ConfigError for a number of layers that the tensors cannot be of; listing their names would not end."""
    # Before any name map is built, whose rules grow with the number of layers.
    for key, value in external.items():
        if not isinstance(value, int | float) or not ("layers" in key or key == "n_layer"):
            continue
        if value > max(PLAUSIBLE_LAYERS, num_tensors):
            raise ConfigError(f"config.json: {key}={value:g}, and the checkpoint has {num_tensors} tensors in all")


def _config_of_file(family: Family, external: Mapping[str, Any], names: list[str], host: PluginHost) -> Config:
    return read_config(family, held_config(family, external, names), host)


def held_config(family: Family, external: Mapping[str, Any], names: list[str]) -> Mapping[str, Any]:
    """config.json of what a folder with tensors of these names holds."""
    # Optional in a family of a plugin, see HuggingFaceFamily.held.
    held = getattr(family, "held", None)
    return external if held is None else held(external, names)


def read_config(family: Family, external: Mapping[str, Any], host: PluginHost) -> Config:
    """Raises ConfigError for what the family cannot express, and for a model that breaks the family's own rules."""
    return read_model(family.read_config, external, host)


def _fitting(
    able: list[Family], external: Mapping[str, Any], names: list[str], host: PluginHost
) -> tuple[Family, Config]:
    # Several families share a model_type: the tensors decide, since config.json of a base model and of one with a head
    # may be equal.
    reasons: dict[str, Exception] = {}
    fitting: list[tuple[Family, Config]] = []
    for family in able:
        try:
            config = _config_of_file(family, external, names, host)
            require_names(family, config.model, names)
        except (ConfigError, CheckpointError) as error:
            reasons[family.family] = error
        else:
            fitting.append((family, config))
    listed = external.get("architectures")
    meant = listed[:1] if isinstance(listed, list) else []
    named = next((f.family for f in able if meant and meant[0] in f.architectures.values()), None)
    # What config.json says is wrong with the family that it names: that another one has such tensors is chance.
    if isinstance(reasons.get(named or ""), ConfigError):
        raise reasons[named or ""]
    if fitting:
        chosen = next((candidate for candidate in fitting if _architectures(*candidate) == meant), fitting[0])
        # Else a damaged tower, or one whose configuration is refused, would be left out without a word.
        whole = reasons.get(named or "") or next((r for r in reasons.values() if isinstance(r, ConfigError)), None)
        if whole is not None and _leaves_out(*chosen, names):
            raise whole
        return chosen
    # The reason that is shown is that of the family which config.json means.
    raise reasons[named] if named is not None else _why_none_fits(reasons)


def _why_none_fits(reasons: Mapping[str, Exception]) -> Exception:
    """A family that reads config.json and lacks tensors is nearer than one that cannot read it."""
    return next((error for error in reasons.values() if isinstance(error, CheckpointError)), all_refuse(reasons))


def _leaves_out(family: Family, config: Config, names: Iterable[str]) -> bool:
    """Whether there are tensors of other parts than the family has."""
    return bool(family.name_map(config.model).left_out(family.spelling(config.model, name) for name in names))


def _architectures(family: Family, config: Config) -> Any:
    """What config.json would say: heads that choose a class and that choose a text have the same names of tensors."""
    try:
        return family.write_config(config.model).get("architectures")
    except ConfigError:  # it can be read only
        return None


def require_names(family: Family, config: Any, names: Iterable[str]) -> None:
    """Raises CheckpointError for external names that are missing, unknown or taken twice."""
    rules = family.name_map(config)
    copies = family.copies(config)
    spelled = {family.spelling(config, name) for name in names}
    present = {name for name in spelled if name not in copies}
    # Of two tied tensors some programs store the one, some the other.
    present |= {original for copy, original in copies.items() if copy in spelled}
    rules.reading(present).check([rule.ours for rule in rules.rules], present)
