"""A `CheckpointReader` of merged models: each tensor is merged when it is read, as the tensors of Hugging Face's format
that it stands for, so that the results are those of programs that merge such files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.hugging_face.family import FORMAT, family_named
from mt_ckpt.merging.methods import (
    Differences,
    Pieces,
    Sparsity,
    as_float,
    linear,
    passthrough,
    slerp,
    task_arithmetic,
    ties,
)
from mt_ckpt.merging.recipe import NORMALIZED, MergeRecipe, Slice, Source, value_of
from mt_ckpt.model import expected_parameters
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import config_from_dict
from mt_core.errors import CheckpointError, ConfigError
from mt_core.name_map import Rule, Same
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS

_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RESCALES = {True: "l1", False: "none", "l1": "l1", "none": "none", "density": "density"}


@dataclass(frozen=True)
class Place:
    """A tensor of the result within a slice: sources by their own names for it, and the fraction of the slice's
    layers."""

    part: Slice
    names: Mapping[str, str]
    fraction: float


class Merged:
    """metadata and files are those of the base, or of the first model."""

    def __init__(
        self, recipe: MergeRecipe, readers: Mapping[str, CheckpointReader], host: PluginHost, seed: int = 0
    ) -> None:
        """readers: by model, as recipe.models(). Raises CheckpointError for models that are not of one architecture,
        and ConfigError for layers that a model does not have."""
        self.recipe, self.seed = recipe, seed
        self._readers = readers
        self._first = readers[recipe.models()[0]]
        self._files_of = readers[recipe.tokenizer or recipe.models()[0]]
        self._layers = {model: _number_of_layers(reader, model) for model, reader in readers.items()}
        self._places = self._plan(host)
        self._rules = _rules(self.metadata, host)
        self._require_one_architecture()

    @property
    def metadata(self) -> Mapping[str, Any]:
        stored = self._first.metadata
        config = dict(stored["config"])
        config["model"] = {**config["model"], "num_layers": self._num_layers}
        if "tokenizer" in self._files_of.metadata["config"]:
            config["tokenizer"] = self._files_of.metadata["config"]["tokenizer"]
        return {"iteration": 0, "config": config, "merged": {"method": self.recipe.method, "of": self.recipe.models()}}

    @property
    def _num_layers(self) -> int:
        return sum(end - first for first, end in map(self._range, self.recipe.slices))

    def _range(self, part: Slice) -> tuple[int, int]:
        source = part.sources[0]
        first, end = source.layers or (0, self._layers[source.model])
        return first, end

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._stored_shape(name) for name in self._places}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        chosen = None if self.recipe.dtype is None else _DTYPES[self.recipe.dtype]
        return {name: self._dtype(name, chosen) for name in self._places}

    def files(self) -> Mapping[str, bytes]:
        return self._files_of.files()

    def read(self, name: str) -> Tensor:
        place, rule = self._places[name], self._rules[name]
        dtype = self.dtypes()[name]
        sample = self._readers[place.part.sources[0].model].read(place.names[place.part.sources[0].model])
        if not sample.is_floating_point():
            return sample
        return rule.import_value(self._merge(place, rule)).to(dtype)

    def _merge(self, place: Place, rule: Rule) -> Pieces:
        order = self._order(place.part)

        def read(number: int) -> Pieces:
            model = order[number].model
            tensor = self._readers[model].read(place.names[model])
            wide = torch.promote_types(tensor.dtype, torch.float32)
            return [piece.to(wide) for piece in rule.export_value(tensor)]

        values = _Values(self.recipe, place, rule.sources)
        if self.recipe.method == "linear":
            return linear(read, [values.of(source, "weight") for source in order], values.flag("normalize"))
        if self.recipe.method == "slerp":
            return slerp(read, values.of(None, "t"))
        if self.recipe.method == "passthrough":
            return passthrough(read, values.optional(order[0], "scale"))
        return self._merge_differences(read, values, order[1:])

    def _merge_differences(self, read: Any, values: _Values, tuned: Sequence[Source]) -> Pieces:
        method = self.recipe.method
        sparsity = None
        if method == "ties":
            sparsity = Sparsity()
        elif method.startswith("dare"):
            sparsity = Sparsity(random=True, rescale=values.rescale(), seed=self.seed)
        differences = Differences(
            read,
            values.names,
            [values.of(source, "weight") for source in tuned],
            [values.of(source, "density", 1.0) for source in tuned],
            sparsity,
        )
        combine = ties if method in ("ties", "dare_ties") else task_arithmetic
        return combine(differences, values.shared("lambda", 1.0), values.flag("normalize"))

    def _order(self, part: Slice) -> list[Source]:
        """The base first, where there is one."""
        base = self.recipe.base
        if base is None:
            return list(part.sources)
        return [Source(base), *self.recipe.tuned(part)]

    # -- which tensors of which models ----------------------------------------------------------------

    def _plan(self, host: PluginHost) -> dict[str, Place]:
        config = config_from_dict({"model": self.metadata["config"]["model"]}, host)
        places: dict[str, Place] = {}
        bounds = self._bounds()
        for name in expected_parameters(config, host):
            full, layer = MODEL + name, _LAYER.search(name)
            if layer is None:
                # Before the layers as in the first slice, behind them as in the last.
                part = self.recipe.slices[0 if "embedding" in name else -1]
                places[full] = Place(part, dict.fromkeys(self._models_of(part), full), 0.0)
            else:
                places[full] = self._layer_place(full, int(layer[0]), bounds)
        return places

    def _bounds(self) -> list[int]:
        """The first layer of each slice in the result, and the number of all."""
        bounds = [0]
        for part in self.recipe.slices:
            first, end = self._range(part)
            bounds.append(bounds[-1] + end - first)
            for source in part.sources:
                if source.layers is not None and source.layers[1] > self._layers[source.model]:
                    raise ConfigError(
                        f"layer_range {list(source.layers)} of {source.model}, which has {self._layers[source.model]} "
                        "layers"
                    )
        return bounds

    def _layer_place(self, name: str, layer: int, bounds: Sequence[int]) -> Place:
        number = next(index for index in range(len(bounds) - 1) if layer < bounds[index + 1])
        part, offset, count = self.recipe.slices[number], layer - bounds[number], bounds[number + 1] - bounds[number]
        firsts = {source.model: (source.layers or (0, 0))[0] for source in part.sources}
        if self.recipe.base is not None:
            firsts.setdefault(self.recipe.base, next(iter(firsts.values())))
        names = {model: _LAYER.sub(str(first + offset), name, count=1) for model, first in firsts.items()}
        return Place(part, names, offset / (count - 1) if count > 1 else 1.0)

    def _models_of(self, part: Slice) -> list[str]:
        return [source.model for source in self._order(part)]

    def _require_one_architecture(self) -> None:
        shapes = {model: reader.shapes() for model, reader in self._readers.items()}
        for name, place in self._places.items():
            kinds = {model: shapes[model].get(theirs) for model, theirs in place.names.items()}
            if None in kinds.values() or len(set(map(tuple, kinds.values()))) > 1:  # type: ignore[arg-type]
                summary = ", ".join(f"{model}: {list(shape) if shape else 'none'}" for model, shape in kinds.items())
                raise CheckpointError(
                    f"the models are not of one architecture: {name.removeprefix(MODEL)} is {summary}"
                )

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        model, theirs = next(iter(self._places[name].names.items()))
        return tuple(self._readers[model].shapes()[theirs])

    def _dtype(self, name: str, chosen: torch.dtype | None) -> torch.dtype:
        model = self._order(self._places[name].part)[0].model
        stored = self._readers[model].dtypes()[self._places[name].names[model]]
        return chosen if chosen is not None and stored.is_floating_point else stored


class _Values:
    """Parameters of the pieces of one tensor: those of a source first, then the slice's, then those of all."""

    def __init__(self, recipe: MergeRecipe, place: Place, names: Sequence[str]) -> None:
        self.recipe, self.place, self.names = recipe, place, names

    def of(self, source: Source | None, key: str, default: float | None = None) -> list[float]:
        """A number for each piece. Raises ConfigError where there is none."""
        values = self.optional(source, key)
        if default is None and None in values:
            where = "" if source is None else f" of {source.model}"
            raise ConfigError(f"merge_method {self.recipe.method} needs the parameter {key}{where}")
        return [default if value is None else value for value in values]  # type: ignore[misc]

    def optional(self, source: Source | None, key: str) -> list[float | None]:
        values = [self._found(source, key, name) for name in self.names]
        return [None if value is None else self._number(value, key) for value in values]

    def shared(self, key: str, default: float) -> float:
        value = self._found(None, key, self.names[0])
        return default if value is None else self._number(value, key)

    def flag(self, key: str) -> bool:
        value = self._found(None, key, self.names[0])
        return self.recipe.method in NORMALIZED if value is None else bool(value)

    def rescale(self) -> Any:
        value = self._found(None, "rescale", self.names[0])
        if value not in (None, *RESCALES):
            raise ConfigError(f"rescale is {value!r}; it can be true (l1), false (none), l1, density or none")
        return RESCALES[True if value is None else value]

    def _number(self, value: Any, key: str) -> float:
        try:
            return as_float(value, key)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _found(self, source: Source | None, key: str, name: str) -> Any:
        groups = [*([source.parameters] if source is not None else []), self.place.part.parameters]
        for group in (*groups, self.recipe.parameters):
            if key in group and (value := value_of(group[key], name, self.place.fraction)) is not None:
                return value
        return None


def _number_of_layers(reader: CheckpointReader, model: str) -> int:
    layers = reader.metadata["config"]["model"].get("num_layers")
    if not isinstance(layers, int):
        raise ConfigError(
            f"{model}: model.family={reader.metadata['config']['model']['family']} has no stack of layers"
        )
    return layers


def _rules(metadata: Mapping[str, Any], host: PluginHost) -> dict[str, Rule]:
    """Canonical name -> its tensors in Hugging Face's format; itself for a family that has no names there."""
    config = config_from_dict({"model": metadata["config"]["model"]}, host)
    if FORMAT in host[MODELS].get(config.model.family, key="model.family").name_maps:
        rules = family_named(config.model.family, host).name_map(config.model).rules
        return {MODEL + rule.ours: rule for rule in rules}
    return {MODEL + name: Same(name, name) for name in expected_parameters(config, host)}
