"""Conversations with tools in tokens, for loops of a program's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mt_tune.environments.base import Episode
from mt_tune.environments.dialogues import Dialogue, SourcesByName
from mt_tune.environments.episodes import TokenEpisode, plain_turn, turn_reader
from mt_tune.environments.tool_dialogues import Factory, Tool, ToolDialogues
from mt_tune.environments.turns import TurnEncoder


class ToolEnvironment:
    """Implements mt_tune.environments.base.Environment by tools, and by environments that factories make.

    tools: as of ToolDialogues. factories: one under None, or several by the name that the column `environment` of a row
    has.
    """

    def __init__(
        self,
        encoder: TurnEncoder,
        tools: Sequence[Tool] = (),
        factories: Mapping[str | None, Factory] | None = None,
        *,
        max_turns: int | None = None,
    ) -> None:
        self._encoder, self._max_turns = encoder, max_turns
        by_name: dict[str | None, Factory | None] = {**factories} if factories else {None: None}
        self._sources = SourcesByName({name: ToolDialogues(tools, factory) for name, factory in by_name.items()})
        self._read_turn = turn_reader(encoder.template.source)
        self._dialogues: dict[int, Dialogue] = {}

    def start(self, row: Mapping[str, Any]) -> Episode:
        """Raises ConfigError for a row without a prompt or with an unknown environment, EpisodeError where `reset`
        raises."""
        dialogue = self._sources.begin(row)
        read = self._read_turn if dialogue.tools else plain_turn
        episode = TokenEpisode(dialogue, self._encoder, read, self._max_turns)
        self._dialogues[id(episode)] = dialogue
        return episode

    def release(self, episode: Episode) -> None:
        self._sources.release(self._dialogues.pop(id(episode)))

    def close(self) -> None:
        self._sources.close()
