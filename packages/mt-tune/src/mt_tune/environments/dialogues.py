"""Episodes of messages: a dialogue answers what the model says, and `TokenEpisode` keeps the tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mt_core.errors import ConfigError
from mt_tune.environments.base import Continuation, Message
from mt_tune.environments.turns import TurnEncoder

ReadTurn = Callable[[str], Message]
"""The assistant's message in the text of a turn: content, and tool_calls with arguments as objects."""


@dataclass(frozen=True)
class Reply:
    """messages: of tools or a user; none where the dialogue is done. The rest as in Continuation."""

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Dialogue(Protocol):
    """The other side of a conversation. tools: JSON schemas, for the template. environment: as in Episode."""

    prompt: list[Message]
    tools: list[Any] | None
    environment: Any

    def reply(self, message: Message) -> Reply:
        """What follows a turn of the model."""
        ...

    def end(self) -> Reply:
        """The conversation ends without a reply: the model's turn was cut off, or there were enough of them."""
        ...


class TokenEpisode:
    """Implements mt_tune.environments.base.Episode by a dialogue. max_turns: of the model."""

    def __init__(
        self, dialogue: Dialogue, encoder: TurnEncoder, read_turn: ReadTurn, max_turns: int | None = None
    ) -> None:
        self._dialogue, self._encoder, self._read, self._max_turns = dialogue, encoder, read_turn, max_turns
        self.prompt = list(dialogue.prompt)
        self.prompt_ids = encoder.prompt_ids(self.prompt, dialogue.tools)
        self.messages: list[Message] = []
        self.environment = dialogue.environment
        self.turns = 0

    def after(self, completion_ids: Sequence[int], *, finished: bool = True) -> Continuation:
        # Decoded to be read; what goes on is the ids.
        text = self._encoder.tokenizer.decode(list(self._encoder.content_ids(completion_ids)))
        message = self._read(text)
        self.messages.append(message)
        self.turns += 1
        reply = self._dialogue.reply(message) if finished and not self._is_last() else self._dialogue.end()
        if not reply.messages:
            return Continuation([], True, reply.reward, reply.metrics)
        added = self._encoder.added_ids(completion_ids, message, reply.messages, self._dialogue.tools)
        self.messages += reply.messages
        return Continuation(added, False, reply.reward, reply.metrics)

    def _is_last(self) -> bool:
        return self._max_turns is not None and self.turns >= self._max_turns


def plain_turn(text: str) -> Message:
    """A turn without calls of tools."""
    return {"role": "assistant", "content": text}


def turn_reader(template_source: str) -> ReadTurn:
    """Reads turns with calls of tools in the form that a chat template has the model write them.

    Raises ConfigError for a template whose form is not known.
    """
    # mt-tune can do without mt-infer, of which rollouts need the engine.
    from mt_infer.chat.tool_calls import ToolCallParser, form_of_template

    form = form_of_template(template_source)
    if form is None:
        raise ConfigError("the chat template has no form of tool calls that mt reads (hermes, llama3_json)")

    def read(text: str) -> Message:
        parser = ToolCallParser(form)
        content = parser.add(text)
        rest, calls = parser.finish()
        functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
        listed = [{"type": "function", "function": function} for function in functions]
        return {"role": "assistant", "content": content + rest, **({"tool_calls": listed} if listed else {})}

    return read
