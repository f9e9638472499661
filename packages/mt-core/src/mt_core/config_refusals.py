"""The configuration of the model that a config.json describes; what is wrong with it is said of its fields.

Rules of [model] name keys of [model], which whoever has a config.json did not write. The fields that a key was read
from are those whose values change it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.config_types import FIELD_TYPES, INTEGER
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost

Read = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Keys of [model] from a config.json; raises ConfigError."""
Path = tuple[str, ...]
MOST_FIELDS = 4
"""Most fields that a message names as those of one key."""
_ABSENT = object()
_KEY = re.compile(r"(?<![\w.\[])model\.[a-z]\w*(?:\.\w+)*")
_OF_ONE_KEY = re.compile(rf"({_KEY.pattern}) \(from [^)]*\): got .*?, (expected .*|[a-z].*)")
_ABOVE = re.compile(rf"{_KEY.pattern} \(from [^)]*\): (?={_KEY.pattern})")
_OF_PART = re.compile(rf"in ({_KEY.pattern}), which is \[model\] in what follows: ")
_MISSING = re.compile(rf"({_KEY.pattern}) is missing; .*")


def read_model(read: Read, external: Mapping[str, Any], host: PluginHost) -> Config:
    """external: contents of config.json. Raises ConfigError, which names fields of it, for what `read` refuses and for
    a model that breaks the rules of its family."""
    try:
        return _checked(read(external), host)
    except ConfigError as error:
        message = _in_fields(str(error), read, external)
        if message == str(error):
            raise
        raise ConfigError(message) from error


def _checked(section: Mapping[str, Any], host: PluginHost) -> Config:
    config = config_from_dict({"model": section}, host)
    # The rules of a training, such as the number of experts that a router chooses: a model that breaks one would fail
    # where it is built or computes. How long samples are is not the model's: as long as its positions.
    text = getattr(config.model, "decoder", config.model)  # of a model that reads images too
    length = getattr(text, "max_position_embeddings", None) or config.data.seq_length
    host.check_config(config.model_copy(update={"data": config.data.model_copy(update={"seq_length": length})}))
    return config


def _in_fields(message: str, read: Read, external: Mapping[str, Any]) -> str:
    """The message with the fields of config.json in place of keys of [model], and with the paths of fields that stand
    in a part."""
    section = _section(read, external)
    if section is None:
        return _with_culprits(_with_paths(message, read, external), read, external)
    origins = _Origins(read, external, section)
    return "\n".join(_line_in_fields(line, origins) for line in message.split("\n"))


def _section(read: Read, external: Mapping[str, Any]) -> Mapping[str, Any] | None:
    try:
        return read(external)
    except ConfigError:
        return None


# -- keys of [model] ---------------------------------------------------------------------------------


class _Origins:
    """Which fields each key of [model] was read from. section: what was read."""

    def __init__(self, read: Read, external: Mapping[str, Any], section: Mapping[str, Any]) -> None:
        self.read, self.external, self.section = read, external, section
        self._others: list[tuple[Path, Any, Mapping[str, Any]]] | None = None

    def of(self, key: str) -> list[tuple[Path, Any]]:
        """(path, value) of the fields whose values change `key`, written as in a message: model.moe.num_experts."""
        value = _at(self.section, key)
        if self._others is None:
            self._others = list(self._changed())
        changed = {path: stated for path, stated, other in self._others if _at(other, key) != value}
        return list(changed.items())

    def _changed(self) -> Iterator[tuple[Path, Any, Mapping[str, Any]]]:
        """(path, its value, what is read with another value)."""
        for path, value in _leaves(self.external):
            for other in _other_values(value):
                section = _section(self.read, _with_value(self.external, path, other))
                if section is not None:
                    yield path, value, section

    def of_missing(self, key: str) -> list[str]:
        """Names of fields that are not there and would give `key`."""
        parts = [(), *((name,) for name, value in self.external.items() if isinstance(value, Mapping))]
        able = [(*part, name) for part in parts for name, known in FIELD_TYPES.items() if INTEGER in known.types]
        read = ((path, _section(self.read, _with_value(self.external, path, 1))) for path in able)
        return [".".join(path) for path, section in read if section and _at(section, key) is not _ABSENT]


def _line_in_fields(line: str, origins: _Origins) -> str:
    line = _ABOVE.sub("", line)
    if part := _OF_PART.match(line):
        # Keys of a part of the model, which has rules as a model by itself.
        line = line[part.end() :].replace("model.", f"{part[1]}.")
    if missing := _MISSING.fullmatch(line):
        names = origins.of_missing(missing[1])
        return f"{' or '.join(names)} is missing, from which {missing[1]} is read" if names else line
    if (refused := _OF_ONE_KEY.fullmatch(line)) and 0 < len(fields := origins.of(refused[1])) <= MOST_FIELDS:
        return f"{_subject(refused[1], fields, origins)}: {refused[2]}"
    return re.sub(rf"{_KEY.pattern}(=[^\s,;:]+)?", lambda found: _in_place_of(found, origins), line)


def _subject(key: str, fields: list[tuple[Path, Any]], origins: _Origins) -> str:
    value = _at(origins.section, key)
    if len(fields) == 1 and fields[0][1] == value:
        return f"{_shown(*fields[0])} is not supported"
    are = "is" if len(fields) == 1 else "are"
    return f"{' and '.join(_shown(*entry) for entry in fields)} {are} not supported, since {value!r:.80} comes of it"


def _in_place_of(found: re.Match[str], origins: _Origins) -> str:
    key = found[0].partition("=")[0]
    fields = origins.of(key)
    # A part of the model is made of all its fields.
    if not fields or len(fields) > MOST_FIELDS:
        return found[0]
    if len(fields) == 1 and fields[0][1] == _at(origins.section, key):
        return _shown(*fields[0]) if found[1] else ".".join(fields[0][0])
    return f"{found[0]} (from {' and '.join(_shown(*entry) for entry in fields)})"


def _shown(path: Path, value: Any) -> str:
    return f"{'.'.join(path)}={value!r:.80}"


def _at(section: Mapping[str, Any], key: str) -> Any:
    """key: with the name of the section, model.moe.num_experts."""
    value: Any = section
    for name in key.split(".")[1:]:
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return _ABSENT
    return value


# -- fields of config.json ---------------------------------------------------------------------------


def _leaves(external: Mapping[str, Any], within: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in external.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*within, name))
        elif name != "model_type" and isinstance(name, str):
            yield (*within, name), value


def _other_values(value: Any) -> Iterator[Any]:
    """Values of the same type, of which a family may read one that it cannot read another of."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2, value - 1, 1)
    elif isinstance(value, float):
        yield from (value * 2 + 1, value / 2, 0.5)
    elif isinstance(value, list):
        yield from (value[:-1], value + value[-1:]) if value else ([1],)
    elif isinstance(value, str):
        yield f"{value}x"
    elif value is None:
        yield 1


def _with_value(external: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    return {**external, path[0]: value if len(path) == 1 else _with_value(external[path[0]], path[1:], value)}


def _without(external: Mapping[str, Any], path: Path) -> dict[str, Any]:
    rest = {name: value for name, value in external.items() if name != path[0]}
    return rest if len(path) == 1 else {**rest, path[0]: _without(external[path[0]], path[1:])}


def _with_paths(message: str, read: Read, external: Mapping[str, Any]) -> str:
    """A message of a part's own map names fields without the part."""
    refusal = message
    for path in _nested(external):
        name, dotted = path[-1], ".".join(path)
        # Not in a value that the message shows.
        word = re.compile(rf"(?<![\w.'\"]){re.escape(name)}" + ("(?![\\w'\"])" if "_" in name else "(?==)"))
        if dotted in message or not word.search(message):
            continue
        # Without the field at fault the part says something else, or nothing.
        above = name in external and _refusal(read, _without(external, (name,))) != refusal
        if not above and _refusal(read, _without(external, path)) != refusal:
            message = word.sub(dotted, message)
    return message


_UNUSABLE = " cannot be used: "


def _with_culprits(message: str, read: Read, external: Mapping[str, Any]) -> str:
    """A message that shows all fields of a step of reading, with those alone of which another value can be read."""
    if _UNUSABLE not in message:
        return message
    able = [
        (path, value)
        for path, value in _leaves(external)
        if any(_section(read, _with_value(external, path, other)) is not None for other in _other_values(value))
    ]
    if not 0 < len(able) <= MOST_FIELDS:
        return message
    return f"{' and '.join(_shown(*entry) for entry in able)}{_UNUSABLE}{message.partition(_UNUSABLE)[2]}"


def _nested(external: Mapping[str, Any], within: Path = ()) -> Iterator[Path]:
    """Paths of what stands in a table of config.json, each table before what is in it."""
    for name, value in external.items():
        # id2label has numbers before it is JSON.
        if within and isinstance(name, str):
            yield (*within, name)
        if isinstance(value, Mapping):
            yield from _nested(value, (*within, name))


def _refusal(read: Read, external: Mapping[str, Any]) -> str | None:
    try:
        read(external)
    except ConfigError as error:
        return str(error)
    return None
