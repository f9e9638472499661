"""YAML 1.2 text as plain values: no tags that make objects, no duplicate keys, bounded nesting and aliases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mt_core.errors import ConfigError

MAX_DEPTH = 32
MAX_NODES = 100_000
"""Nodes with each alias counted as what it stands for: an alias of aliases of aliases multiplies ("billion laughs")."""


def parse_yaml(text: str) -> Any:
    """Raises ValueError for text that is no YAML or beyond the limits, ConfigError if no parser is installed."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError
    except ImportError:
        raise ConfigError('YAML files need ruamel.yaml: pip install "mt-core[yaml]"; or write TOML or JSON') from None
    # Events come one by one without recursion, so that the limits hold before anything is built.
    try:
        require_small(YAML(typ="safe", pure=True).parse(text))
        # A second parser: the first one is used up by its events.
        values = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        if isinstance(error, MarkedYAMLError):
            error.note = None  # how to turn a check of ruamel.yaml off in Python
        raise ValueError(str(error)) from error
    _require_text_keys(values)
    return {} if values is None else values


def require_small(events: Iterable[Any]) -> None:
    """Raise ValueError for a document that is nested too deep, too large with its aliases, or contains itself."""
    from ruamel.yaml import events as kinds

    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, nodes inside so far) from the root inwards
    for event in events:
        if isinstance(event, kinds.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > MAX_DEPTH:
                raise ValueError(f"nested more than {MAX_DEPTH} deep{event.start_mark}")
            continue
        anchor, size = None, 0
        if isinstance(event, kinds.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"*{event.anchor} stands inside of itself, or is not defined{event.start_mark}")
            size = sizes[event.anchor]
        elif isinstance(event, kinds.ScalarEvent):
            anchor, size = event.anchor, 1
        elif isinstance(event, kinds.CollectionEndEvent):
            anchor, size = open_nodes.pop()
        # Known from its end on: an alias inside of its own node is refused above.
        if anchor is not None:
            sizes[anchor] = size
        # Sizes add up from the innermost node outwards; an alias counts its node again.
        outer, inside = open_nodes[-1]
        open_nodes[-1] = (outer, inside + size)
        if inside + size > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} values once its aliases are written out{event.start_mark}")


def _require_text_keys(values: Any) -> None:
    for entry in values if isinstance(values, list) else ():
        _require_text_keys(entry)
    for key, entry in values.items() if isinstance(values, dict) else ():
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is no text; put it in quotes")
        _require_text_keys(entry)
