"""What an engine is built from when the caller has a model, or a configuration, of transformers in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CheckpointReader
from mt_core.config_map import HF_FORMAT, model_section, tokenizer_section
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost

Sections = dict[str, dict[str, Any]]


@runtime_checkable
class PreTrainedConfigLike(Protocol):
    """A `transformers.PretrainedConfig`."""

    def to_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class PreTrainedModelLike(Protocol):
    """A `transformers.PreTrainedModel`."""

    @property
    def config(self) -> PreTrainedConfigLike: ...

    def state_dict(self) -> Mapping[str, Any]: ...


def read_source(
    source: PreTrainedModelLike | PreTrainedConfigLike, host: PluginHost
) -> tuple[Sections, CheckpointReader | None]:
    """[model] and [tokenizer], and the weights of a model. Raises ConfigError for another object, and for a model_type
    of no registered family."""
    if isinstance(source, PreTrainedModelLike):
        reader = _open_module(source, host)
        return {name: dict(keys) for name, keys in reader.metadata["config"].items()}, reader
    if not isinstance(source, PreTrainedConfigLike):
        raise ConfigError(
            f"a {type(source).__name__} is no model and no configuration of transformers; give one, or build the "
            "engine from a configuration of mt: Engine.build(load_config(...))"
        )
    external = source.to_dict()
    model = model_section(external, host)
    return {"model": model, "tokenizer": tokenizer_section(external, model.get("vocab_size"))}, None


def _open_module(module: PreTrainedModelLike, host: PluginHost) -> CheckpointReader:
    spec = host[CHECKPOINT_LOADERS].get(HF_FORMAT, key="the format of a model of transformers")
    if spec.open_module is None:
        raise ConfigError(f"the checkpoint loader {spec.name} reads no model from memory")
    reader: CheckpointReader = spec.open_module.load()(module, host)
    return reader


def with_sections(source: Sections, sections: Mapping[str, Mapping[str, Any]] | None) -> Sections:
    """The sections of the source, with the caller's keys over them."""
    return {**source, **{name: {**source.get(name, {}), **keys} for name, keys in (sections or {}).items()}}
