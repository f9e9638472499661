"""Whether mt takes a published model: the fields of its config.json and the names and shapes of its tensors. A folder
or file of another format, such as Mistral's own with `params.json`, is read as `mt convert` reads it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mt_cli.presets import can_count, canonical_shapes, count_parameters
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CheckpointLoaderSpec
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.config_map import CONFIG, HF_FORMAT, PARTS, QUANTIZATION_KEYS, model_section, read_hf_config, unquantized
from mt_core.config_refusals import read_model
from mt_core.config_types import FIELD_TYPES, INTEGER
from mt_core.errors import ConfigError, MtError
from mt_core.plugins import PluginHost
from mt_core.specs import SECTIONS

MOST_PROBLEMS = 20
LARGEST_SIZE = 2**31 - 1
"""Above it a size is named where no tensors can be made."""


@dataclass(frozen=True)
class Problem:
    """Something that keeps a model from being read. names: the fields of config.json, or the tensors, that it names."""

    where: Literal["config.json", "tensors"]
    names: list[str]
    why: str


@dataclass(frozen=True)
class ModelCheck:
    """What `mt models check` found.

    model_type: of config.json; the name of a format that has none. family: None for what no family reads. parameters:
    None where torch is missing. tensors: those of the model; None where config.json stands alone. left_out: patterns of
    stored names that are parts of the published model beside it, and the number of their tensors. quantization: how
    config.json says that tensors are stored; None: they are not quantized."""

    path: str
    model_type: str
    family: str | None
    parameters: int | None
    tensors: int | None
    left_out: Mapping[str, int]
    quantization: str | None
    problems: list[Problem]

    @property
    def taken(self) -> bool:
        return not self.problems


def check_model(path: Path, host: PluginHost) -> ModelCheck:
    """path: config.json, a folder that has it and perhaps weights, or a checkpoint of another format.

    Raises ConfigError for what is none of them.
    """
    if (loader := _other_format(path, host)) is not None:
        return _check_other(path, loader, host)
    stored = read_hf_config(path)
    external = unquantized(stored)
    config, problems = _read(external, host)
    problems = [*_storage_problems(stored, host), *problems]
    parameters = None
    if config is not None and not problems and can_count():
        try:
            parameters = count_parameters(config, host).total
        except MtError as error:
            problems = [_config_problem(error, external)]
        # torch's, for shapes that no tensor can have.
        except (TypeError, RuntimeError, OverflowError) as error:
            problems = [_without_tensors(error, external)]
    tensors: int | None = None
    left_out: Mapping[str, int] = {}
    loader = host[CHECKPOINT_LOADERS].get(HF_FORMAT)
    # Without a family the names of tensors say nothing, but where no field but the class is named the model may be of
    # another form, which the loader knows: a reward model is no classifier of one class.
    named = {name for problem in problems for name in problem.names}
    if named <= {"architectures"} and path.is_dir() and loader.detect.load()(path):
        read, tensors, left_out, wrong = _check_tensors(path, loader, host)
        problems = [] if not wrong else problems or wrong
        # Tensors may have layers of multi-token prediction that config.json does not count, or lack some, and another
        # head.
        if read is not None and read != config and not problems and can_count():
            config, parameters = read, count_parameters(read, host).total
    family = None if config is None else config.model.family
    model_type, method = str(external["model_type"]), _quantization(stored)
    return ModelCheck(str(path), model_type, family, parameters, tensors, left_out, method, problems)


def _other_format(path: Path, host: PluginHost) -> CheckpointLoaderSpec | None:
    """The format of a checkpoint without config.json. None: with it, or of no format.

    Raises ConfigError for a folder that has neither.
    """
    if (path / CONFIG).is_file() or path.suffix == ".json":
        return None
    loader = next(
        (spec for spec in host[CHECKPOINT_LOADERS] if spec.name != HF_FORMAT and spec.detect.load()(path)), None
    )
    if loader is None and path.is_dir():
        names = ", ".join(sorted(spec.name for spec in host[CHECKPOINT_LOADERS]))
        raise ConfigError(
            f"{path} has no {CONFIG}, and is no checkpoint of another format ({names}); a file that describes a model "
            "otherwise, such as params.json, is read together with the weights beside it"
        )
    return loader


def _check_other(path: Path, loader: CheckpointLoaderSpec, host: PluginHost) -> ModelCheck:
    config, tensors, left_out, problems = _check_tensors(path, loader, host)
    parameters = count_parameters(config, host).total if config is not None and not problems and can_count() else None
    family = None if config is None else config.model.family
    return ModelCheck(str(path), loader.name, family, parameters, tensors, left_out, None, problems)


# -- config.json -------------------------------------------------------------------------------------


def _read(external: Mapping[str, Any], host: PluginHost) -> tuple[Config | None, list[Problem]]:
    """The configuration of the model, without the fields that are refused; and what is wrong with each of these."""
    problems: list[Problem] = []
    left = dict(external)
    while len(problems) < MOST_PROBLEMS:
        try:
            return _configuration(left, host), problems
        except MtError as error:
            problem = _config_problem(error, left)
            problems.append(problem)
            # Further problems show when the fields of this one are at their defaults.
            removed = [name for name in problem.names if name != "model_type"]
            # Without a part or a size nothing more can be said of the model.
            if not removed or any(_is_needed(name) for name in removed):
                break
            left = _without(left, removed)
    return None, problems


def _is_needed(path: str) -> bool:
    name = path.rpartition(".")[2]
    return name in PARTS or (name in FIELD_TYPES and INTEGER in FIELD_TYPES[name].types)


def _configuration(external: Mapping[str, Any], host: PluginHost) -> Config:
    """Raises ConfigError for a field that is unknown or has a value that no family reads, and for impossible shapes."""
    return read_model(lambda table: model_section(table, host), external, host)


def _storage_problems(stored: Mapping[str, Any], host: PluginHost) -> list[Problem]:
    """What keeps tensors from being read that are stored as config.json says. None is found where torch is missing."""
    check = host[CHECKPOINT_LOADERS].get(HF_FORMAT).check_config
    if check is None or _quantization(stored) is None or not can_count():
        return []
    try:
        check.load()(stored)
    except MtError as error:
        return [_config_problem(error, stored)]
    return []


def _quantization(external: Mapping[str, Any]) -> str | None:
    """The name of the method."""
    text = external.get("text_config")
    places = [place for place in (external, text) if isinstance(place, Mapping)]
    settings = [place[key] for place in places for key in QUANTIZATION_KEYS if isinstance(place.get(key), Mapping)]
    return str(settings[0].get("quant_method", "without a name")) if settings else None


def _config_problem(error: MtError, external: Mapping[str, Any]) -> Problem:
    words = set(re.findall(r"[\w.]+", str(error)))
    return Problem("config.json", list(_named(external, words)), str(error))


def _without_tensors(error: Exception, external: Mapping[str, Any]) -> Problem:
    huge = dict(_huge_sizes(external))
    shown = f" ({', '.join(f'{path}={value}' for path, value in huge.items())})" if huge else ""
    return Problem("config.json", list(huge), f"its sizes make no tensors{shown}: {str(error).splitlines()[0]}")


def _huge_sizes(external: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, int]]:
    for key, value in external.items():
        if isinstance(value, Mapping):
            yield from _huge_sizes(value, f"{within}{key}.")
        elif isinstance(value, int) and value > LARGEST_SIZE and key in FIELD_TYPES:
            yield f"{within}{key}", value


def _named(external: Mapping[str, Any], words: Collection[str], within: str = "") -> Iterator[str]:
    """Fields that a message names; those of a part with the path to them, and the part where it is named alone."""
    for key, value in external.items():
        path = f"{within}{key}"
        # Words of how tensors are stored stand in many tables.
        is_part = isinstance(value, Mapping) and key not in QUANTIZATION_KEYS
        inner = list(_named(value, words, f"{path}.")) if is_part else []
        if inner:
            yield from inner
        elif path in words or any(word.startswith(f"{path}.") for word in words):
            yield path


def _without(external: Mapping[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """config.json without these fields."""
    inner = {key: [path.removeprefix(f"{key}.") for path in paths if path.startswith(f"{key}.")] for key in external}
    return {
        key: _without(value, inner[key]) if inner[key] and isinstance(value, Mapping) else value
        for key, value in external.items()
        if key not in paths
    }


# -- tensors -----------------------------------------------------------------------------------------


Found = tuple[Config | None, int | None, Mapping[str, int], list[Problem]]


def _check_tensors(path: Path, loader: CheckpointLoaderSpec, host: PluginHost) -> Found:
    """The model that they are of, their number, what is left out, and what does not fit: names that are missing or
    unknown, and shapes."""
    try:
        reader = loader.open.load()(path, host)
        shapes = reader.shapes()
        stored = reader.metadata["config"]
        # With the sections that other distributions bring, such as a head of scores in place of the LM head.
        brought = {spec.name: stored[spec.name] for spec in host[SECTIONS] if spec.name in stored}
        config = config_from_dict({"model": stored["model"], **brought}, host)
        expected = canonical_shapes(config, host)
    except MtError as error:
        where: Literal["config.json", "tensors"] = "config.json" if isinstance(error, ConfigError) else "tensors"
        return None, None, {}, [Problem(where, tensor_names(str(error)), str(error))]
    missing = [name for name in expected if MODEL + name not in shapes]
    wrong = [Problem("tensors", [name], f"{name} of the model is in no tensor of the folder") for name in missing]
    wrong += [
        Problem(
            "tensors", [name], f"{name} has the shape {list(shape)}, the configuration makes it {list(expected_shape)}"
        )
        for name, expected_shape in expected.items()
        if name not in missing and (shape := tuple(shapes[MODEL + name])) != expected_shape
    ]
    return config, len(shapes), getattr(reader, "left_out", {}), wrong


def tensor_names(message: str) -> list[str]:
    """Words with points in a message: names of tensors."""
    return list(dict.fromkeys(re.findall(r"\b[A-Za-z_]\w*(?:\.\w+)+", message)))
