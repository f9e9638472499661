"""Sources of dialogues by the names that rows choose them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.errors import ConfigError, did_you_mean
from mt_tune.environments.dialogues import Dialogue, DialogueSource

COLUMN = "environment"
"""The column that chooses one of several environments."""


class SourcesByName:
    """Implements DialogueSource by several: the column `environment` of a row chooses one; the one under None takes all
    rows."""

    def __init__(self, sources: Mapping[str | None, DialogueSource]) -> None:
        self._sources = dict(sources)
        self._source_of: dict[int, DialogueSource] = {}

    def begin(self, row: Mapping[str, Any]) -> Dialogue:
        """Raises ConfigError for a row with an unknown environment."""
        source = self._sources.get(None)
        if source is None:
            source = self._sources[self._name(row)]
            row = {key: value for key, value in row.items() if key != COLUMN}
        dialogue = source.begin(row)
        self._source_of[id(dialogue)] = source
        return dialogue

    def release(self, dialogue: Dialogue) -> None:
        self._source_of.pop(id(dialogue)).release(dialogue)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def _name(self, row: Mapping[str, Any]) -> str:
        name = row.get(COLUMN)
        if name not in self._sources:
            known = [str(each) for each in self._sources]
            raise ConfigError(
                f"the row's column environment is {name!r}; the environments are {', '.join(known)}"
                f"{did_you_mean(str(name), known)}"
            )
        return str(name)
