"""The other side of a conversation, in messages: it knows no tokens, so that it may be in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mt_tune.environments.base import Message


@dataclass(frozen=True)
class Reply:
    """messages: of tools or a user; none where the dialogue is done. The rest as in Continuation."""

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Dialogue(Protocol):
    """One conversation. tools: JSON schemas, for the template. environment: as in Episode."""

    prompt: list[Message]
    tools: list[Any] | None
    environment: Any

    def reply(self, message: Message) -> Reply:
        """What follows a turn of the model. Raises EpisodeError for a fault that is not the model's."""
        ...

    def end(self) -> Reply:
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
