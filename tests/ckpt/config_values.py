"""Every field of a configuration of `transformers` under every name, with other values of its type."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from mt_core.config_map import ConfigMap

Path = tuple[str, ...]
IDENTITY = {"model_type", "architectures", "_name_or_path"}
"""Which class it is, which is not varied here."""
ROPE = ("rope_parameters", "rope_scaling")
OF_TYPE: Mapping[type, list[Any]] = {
    bool: [True, False],
    int: [0, 1, 2, 3, 8],
    float: [0.0, 0.3, 1.0, 2.0],
    str: ["unknown"],
    dict: [{}],
    list: [[]],
    torch.dtype: ["bfloat16", "float32"],
}
"""Values to try for a type, whatever the present value is."""


def changes(config: Any, known: ConfigMap | None) -> Iterator[tuple[Path, Any]]:
    """Pairs of the path of a field in config.json and a value that differs from the present one.

    config: a `PreTrainedConfig`. known: the map that reads it, whose keys are varied too.
    """
    types, present = field_types(config), config.to_dict()
    names = [*types, *config.attribute_map, *present, *(_keys_of(known) if known else ())]
    for name in dict.fromkeys(names):
        value = getattr(config, name, None)
        if name in IDENTITY or is_dataclass(value):
            continue
        if name == "per_layer_config":
            yield from (((name,), table) for table in tables_by_layer(present.get(name) or {}))
            continue
        if name in ROPE:
            yield from (((name,), rope) for rope in rope_values(config, name) if rope != present.get(name))
            continue
        annotation = types.get(config.attribute_map.get(name, name), _type_in(known, name, value))
        others = [*of_annotation(annotation), *_near(value), *words_near(config, name, value)]
        yield from (((name,), other) for other in _distinct(others) if not _same(other, value))
    for name, part in vars(config).items():
        if is_dataclass(part) and hasattr(part, "to_dict"):
            yield from (((name, *path), value) for path, value in changes(part, None))


def field_types(config: Any) -> dict[str, Any]:
    """Annotations of the fields that the class declares."""
    # Some annotations are strings, with names that their modules import for type checkers alone.
    hints = get_type_hints(type(config), localns={"torch": torch})
    return {field.name: hints.get(field.name, Any) for field in fields(config)}


def of_annotation(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return [value for part in get_args(annotation) for value in of_annotation(part)]
    if origin is Literal:
        return list(get_args(annotation))
    if annotation is NoneType:
        return [None]
    if origin in (list, tuple):
        return [[], *([value] for value in of_annotation(get_args(annotation)[0])[:3])]
    return list(OF_TYPE.get(origin or annotation, []))


def _near(value: Any) -> list[Any]:
    """Values that differ a little from the present one."""
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int):
        return [value + 1, max(value - 1, 0), 2 * value, value // 2]
    if isinstance(value, float):
        return [2 * value, value / 2]
    if isinstance(value, list) and value:
        return [value[:-1], value[::-1], [value[0]] * len(value), [value[-1]] * len(value)]
    return []


def words_near(config: Any, name: str, value: Any) -> list[str]:
    """Strings that stand in a line of the class's own code together with the name of the field, and for an activation
    the names of all activations."""
    if not isinstance(value, str):
        return []
    from transformers.activations import ACT2FN

    if value in ACT2FN:
        return list(ACT2FN)
    lines = [line for line in _source(type(config).__module__).splitlines() if name in line]
    return [word for line in lines for word in re.findall(r"""["']([\w-]+)["']""", line) if word != name]


@cache
def _source(module: str) -> str:
    """Of the configuration, and of the model beside it."""
    there = [sys.modules.get(name) for name in (module, module.replace(".configuration_", ".modeling_"))]
    return "\n".join(inspect.getsource(found) for found in there if found is not None)


def tables_by_layer(table: dict[str, dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Other sizes in all layers of the table, and in the first one alone."""
    other = {layer: {**entry, "head_dim": 16} for layer, entry in table.items()}
    return [other, dict(list(other.items())[:1])] if table else []


def _keys_of(known: ConfigMap) -> list[str]:
    return [
        *(f.theirs for f in known.fields), *(f.theirs for f in known.fixed), *known.import_extra_keys, *known.ignored
    ]  # fmt: skip


def _type_in(known: ConfigMap | None, name: str, value: Any) -> Any:
    """The type of a field that the class does not declare: of its value, or of what the map has for it."""
    stated = [value]
    if known is not None:
        stated += [f.default for f in known.fields if f.theirs == name]
        stated += [value for f in known.fixed if f.theirs == name for value in f.values]
    otherwise = int if name.endswith("_token_id") else Literal[True]
    return next((type(value) for value in stated if value is not None), otherwise)


def _distinct(values: list[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if not any(_same(value, other) for other in found):
            found.append(value)
    return found


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and first == second


# -- rotary positions ---------------------------------------------------------------------------------


def rope_values(config: Any, name: str) -> Iterator[dict[str, Any] | None]:
    """Tables of rotary positions: every type with what it requires, and each of its further parameters by itself."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # The older name never had a table for each kind of layer.
    table = (getattr(config, "rope_parameters", None) or {}) if name == "rope_parameters" else {}
    kinds = [key for key, value in table.items() if isinstance(value, dict)]
    yield from (None, {})
    for kind in ("default", *ROPE_INIT_FUNCTIONS):
        for flat in _of_kind(kind, config):
            yield from ({**table, key: {**table[key], **flat}} for key in kinds) if kinds else (flat,)
    for key, values in _parameters(config).items():
        for value in values:
            # One parameter of the table that is there.
            yield from ({**table, k: {**table[k], key: value}} for k in kinds) if kinds else ({**table, key: value},)


def _of_kind(kind: str, config: Any) -> Iterator[dict[str, Any]]:
    parameters = _parameters(config)
    required, optional = ([key for key in keys if key in parameters] for keys in _checked_keys(config, kind))
    least = {"rope_type": kind, **{key: parameters[key][0] for key in required}}
    yield least
    yield {"type" if key == "rope_type" else key: value for key, value in least.items()}
    yield from ({**least, key: parameters[key][-1]} for key in dict.fromkeys([*required, *optional]))


def _checked_keys(config: Any, kind: str) -> tuple[list[str], list[str]]:
    """Keys that `transformers` requires of a type, and further ones that it knows."""
    check = getattr(config, f"_validate_{kind}_rope_parameters", None)
    source = inspect.getsource(check) if check is not None else ""
    sets = [
        re.findall(r'"(\w+)"', "".join(re.findall(rf"{name}_keys = {{(.*?)}}", source, re.S)))
        for name in ("required", "optional")
    ]
    return sets[0], [*sets[1], "partial_rotary_factor", "rope_theta"]


def _parameters(config: Any) -> dict[str, list[Any]]:
    """Parameter -> values to try, by its type."""
    from transformers.modeling_rope_utils import RopeParameters

    heads = getattr(config, "num_attention_heads", 4)
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 32) // heads
    values = {float: [2.0, 0.4], int: [8, 64], bool: [False, True], list: [[1.0 + i / 4 for i in range(size // 2)]]}
    hints = get_type_hints(RopeParameters)
    # Optional[X]: the first argument is X.
    found = {key: get_args(hint)[0] for key, hint in hints.items() if key != "rope_type"}
    return {key: values.get(get_origin(kind) or kind, []) for key, kind in found.items()}
