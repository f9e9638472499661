"""Ids of tokens that a config.json names and nothing here computes with: kept for the programs that read such files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mt_core.errors import ConfigError

KEY = "kept_token_ids"
"""The key of [model] that has them."""
OF_GENERATION = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id",
)  # fmt: skip
"""At the top of config.json: what is written there is what generation_config.json says."""
NULL: list[int] = []
"""What stands for null, which TOML does not have."""
Path = tuple[str, ...]
_NAMES_TOKENS = re.compile(r"_token_(ids?|index)$")


def token_ids(external: Mapping[str, Any], within: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, id) of config.json and of the configurations within it, such as ("text_config", "bos_token_id")."""
    for key, value in external.items():
        if isinstance(value, Mapping) and key.endswith("_config"):
            yield from token_ids(value, (*within, key))
        elif _NAMES_TOKENS.search(key):
            yield (*within, key), value


def kept_ids(external: Mapping[str, Any], read: Collection[Path], ignored: Collection[str]) -> dict[str, Any]:
    """Values of `model.kept_token_ids`, tables within tables as they are in config.json.

    read: ids that other keys of [model] have; a null within a part is kept, since such a key has a number for it.
    ignored: keys that are not read, among them parts that are not written again.
    """
    kept: dict[str, Any] = {}
    at_top = {*read, *((key,) for key in OF_GENERATION)}
    for path, value in token_ids(external):
        is_elsewhere = path in read and value is not None if len(path) > 1 else path in at_top
        if is_elsewhere or (len(path) > 1 and path[0] in ignored):
            continue
        table = kept
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = NULL if value is None else value
    return kept


def still_null(kept: Mapping[str, Any], external: Mapping[str, Any], read: Collection[Path]) -> dict[str, Any]:
    """Kept ids without each null that stood for 0 where the key of [model] that has the id has another number now."""
    values: dict[str, Any] = {}
    for name, value in kept.items():
        if isinstance(value, Mapping) and isinstance(external.get(name), Mapping):
            values[name] = still_null(value, external[name], [path[1:] for path in read if path[:1] == (name,)])
        elif not ((name,) in read and value == NULL and external.get(name)):
            values[name] = value
    return values


def with_kept_ids(external: Mapping[str, Any], kept: Mapping[str, Any], kind: str, key: str = KEY) -> dict[str, Any]:
    """config.json with these ids. Raises ConfigError for one of a part that it does not have."""
    values = dict(external)
    for name, value in kept.items():
        if not isinstance(value, Mapping):
            values[name] = None if value == NULL else value
        elif isinstance(values.get(name), Mapping):
            values[name] = with_kept_ids(values[name], value, kind, f"{key}.{name}")
        else:
            raise ConfigError(
                f"model.{key}.{name} cannot be written: the config.json of this {kind} has no {name}; remove that table"
            )
    return values
