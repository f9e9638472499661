"""What is merged and how: from a file in mergekit's form, or from the options of the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_ckpt.merging.methods import as_float
from mt_core.config.files import read_values
from mt_core.errors import ConfigError, did_you_mean

METHODS = {
    "linear": ("weight", "normalize"),
    "slerp": ("t",),
    "task_arithmetic": ("weight", "normalize", "lambda"),
    "ties": ("weight", "density", "normalize", "lambda"),
    "dare_linear": ("weight", "density", "normalize", "lambda", "rescale"),
    "dare_ties": ("weight", "density", "normalize", "lambda", "rescale"),
    "passthrough": ("scale",),
}
"""Method -> its parameters."""
ON_BASE = ("slerp", "task_arithmetic", "ties", "dare_linear", "dare_ties")
NORMALIZED = ("linear", "ties")
"""Methods that divide by the weights unless told otherwise."""
WITHOUT_EFFECT = ("int8_mask",)
"""Parameters of mergekit that change its memory and no value."""
KEYS = ("merge_method", "models", "slices", "base_model", "parameters", "dtype", "out_dtype", "tokenizer_source")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
Setting = Any
"""A value, a list that is interpolated over the layers of a slice, or a list of {filter, value}."""


@dataclass(frozen=True)
class Source:
    """A model with its parameters. layers: [first, end) of its own, None for all."""

    model: str
    layers: tuple[int, int] | None = None
    parameters: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """Layers that are merged of as many layers of each source."""

    sources: tuple[Source, ...]
    parameters: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class MergeRecipe:
    """base: the model that differences are taken from; with slerp the one of t = 0. dtype: of the result, None for that
    of the base or the first model. tokenizer: the model whose tokenizer is taken, None for that of the same."""

    method: str
    slices: tuple[Slice, ...]
    base: str | None = None
    parameters: Mapping[str, Setting] = field(default_factory=dict)
    dtype: str | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a method that is not known, and what it cannot have."""
        if self.method not in METHODS:
            known = ", ".join(METHODS)
            raise ConfigError(f"merge_method {self.method} is not one of {known}{did_you_mean(self.method, METHODS)}")
        if self.method in ON_BASE and self.base is None:
            raise ConfigError(f"merge_method {self.method} needs base_model (--base), one of the models or another")
        if self.method not in ON_BASE and self.base is not None:
            raise ConfigError(f"merge_method {self.method} takes no base_model (--base); remove it")
        for group in self._groups():
            for key in group:
                self._require_parameter(key)
        for part in self.slices:
            self._check(part)

    def models(self) -> list[str]:
        """All models, each once, the one that gives configuration and files first."""
        listed = [source.model for part in self.slices for source in part.sources]
        return list(dict.fromkeys([*([self.base] if self.base is not None else []), *listed]))

    def tuned(self, part: Slice) -> list[Source]:
        """The sources of a slice but the base."""
        return [source for source in part.sources if source.model != self.base]

    def _groups(self) -> list[Mapping[str, Setting]]:
        groups = [self.parameters]
        for part in self.slices:
            groups += [part.parameters, *(source.parameters for source in part.sources)]
        return groups

    def _require_parameter(self, key: str) -> None:
        if key not in METHODS[self.method] and key not in WITHOUT_EFFECT:
            known = ", ".join(METHODS[self.method])
            raise ConfigError(
                f"{key} is no parameter of merge_method {self.method}, which has {known}"
                f"{did_you_mean(key, METHODS[self.method])}"
            )

    def _check(self, part: Slice) -> None:
        counts = {source.layers[1] - source.layers[0] for source in part.sources if source.layers is not None}
        if len(counts) > 1:
            raise ConfigError("the sources of a slice have layer ranges of different lengths; give each as many layers")
        if self.method == "passthrough" and len(part.sources) != 1:
            raise ConfigError(f"passthrough takes one model in each slice, got {len(part.sources)}")
        if self.method == "slerp" and len(self.tuned(part)) != 1:
            raise ConfigError("slerp is between base_model and one other model")
        if not self.tuned(part):
            raise ConfigError("there is no model to merge beside the base")


def read_recipe(path: Path) -> MergeRecipe:
    """A file in mergekit's form (.yaml, .yml, .json). Raises ConfigError for keys and values that have no meaning
    here."""
    values = read_values(path)
    if not isinstance(values, dict) or "merge_method" not in values:
        raise ConfigError(f"{path} has no merge_method; it must be a mapping such as mergekit's")
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"{path}: {key} is not supported{did_you_mean(key, KEYS)}; known are {', '.join(KEYS)}")
    if ("models" in values) == ("slices" in values):
        raise ConfigError(f"{path}: give models or slices, one of the two")
    try:
        slices = _slices(values["slices"]) if "slices" in values else (Slice(_sources(values["models"])),)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error!r} in models or slices; each entry has `model` and perhaps parameters"
        ) from None
    tokenizer = values.get("tokenizer_source")
    if tokenizer == "union":
        raise ConfigError(f"{path}: tokenizer_source union is not supported; name the model whose tokenizer is taken")
    base = values.get("base_model")
    return MergeRecipe(
        values["merge_method"],
        slices,
        base,
        values.get("parameters") or {},
        _dtype(values.get("out_dtype") or values.get("dtype")),
        base if tokenizer == "base" else tokenizer,
    )


def _dtype(name: str | None) -> str | None:
    if name is not None and name not in DTYPES:
        raise ConfigError(f"dtype {name} is not one of {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]


def _slices(entries: Sequence[Mapping[str, Any]]) -> tuple[Slice, ...]:
    return tuple(
        Slice(_sources(entry["sources"]), _known(entry, "sources").get("parameters") or {}) for entry in entries
    )


def _sources(entries: Sequence[Mapping[str, Any]]) -> tuple[Source, ...]:
    return tuple(
        Source(str(entry["model"]), _layers(entry), _known(entry, "model", "layer_range").get("parameters") or {})
        for entry in entries
    )


def _known(entry: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    if unknown := set(entry) - {*names, "parameters"}:
        raise ConfigError(f"{', '.join(sorted(unknown))} is not supported in models or slices")
    return entry


def _layers(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    if "layer_range" not in entry:
        return None
    first, end = entry["layer_range"]
    if not (isinstance(first, int) and isinstance(end, int) and 0 <= first < end):
        raise ConfigError(
            f"layer_range {entry['layer_range']} must be two numbers of layers, the first below the second"
        )
    return first, end


# -- values of parameters ----------------------------------------------------------------------------


def value_of(setting: Setting, name: str, fraction: float) -> Any:
    """A setting for a tensor of this external name, at this fraction of a slice's layers; None: it says nothing."""
    if isinstance(setting, Mapping):
        setting = [setting]
    if not isinstance(setting, list):
        return setting
    if setting and all(isinstance(entry, Mapping) for entry in setting):
        fitting = (entry for entry in setting if entry.get("filter") in (None, "*") or entry["filter"] in name)
        chosen = next(fitting, None)
        return None if chosen is None else value_of(chosen.get("value"), name, fraction)
    return _interpolated([as_float(entry, "an entry of a list") for entry in setting], fraction) if setting else None


def _interpolated(values: list[float], fraction: float) -> float:
    place = fraction * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return (1 - (place - below)) * values[below] + (place - below) * values[above]
