"""The other side of a conversation, in messages: it knows no tokens, so that it may be in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mt_core.errors import ConfigError, did_you_mean
from mt_tune.environments.base import Message

COLUMN = "environment"
"""The column that chooses one of several environments."""


@dataclass(frozen=True)
class Reply:
    """messages: of tools or a user; none where the dialogue is done. The rest as in Continuation."""

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def as_reply(answer: Reply | Mapping[str, Any]) -> Reply:
    """Raises TypeError for a mapping with another key than the fields of a Reply."""
    return answer if isinstance(answer, Reply) else Reply(**answer)


class Dialogue(Protocol):
    """One conversation. tools: JSON schemas, for the template. environment: as in Episode. Answers are of Reply, or
    mappings with its fields."""

    prompt: list[Message]
    tools: list[Any] | None
    environment: Any

    def reply(self, message: Message) -> Reply | Mapping[str, Any]:
        """What follows a turn of the model. Raises EpisodeError for a fault that is not the model's."""
        ...

    def end(self) -> Reply | Mapping[str, Any]:
        """The conversation ends without a reply: the model's turn was cut off, or there were enough of them."""
        ...


class DialogueSource(Protocol):
    """Begins dialogues."""

    def begin(self, row: Mapping[str, Any]) -> Dialogue:
        """row: a record of the data set, with its `prompt`. Raises EpisodeError for a fault of the environment."""
        ...

    def release(self, dialogue: Dialogue) -> None:
        """Takes a dialogue back that has ended; what acted in it may begin another one."""
        ...

    def close(self) -> None: ...


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
