"""Episodes of messages: a dialogue answers what the model says, and `TokenEpisode` keeps the tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from mt_core.errors import ConfigError
from mt_tune.environments.base import Continuation, Message
from mt_tune.environments.dialogues import Dialogue, Reply, as_reply
from mt_tune.environments.turns import TurnEncoder

ReadTurn = Callable[[str], Message]
"""The assistant's message in the text of a turn: content, and tool_calls with arguments as objects."""


class TokenConversation:
    """The tokens and messages of a conversation, whoever answers in it. max_turns: of the model."""

    def __init__(
        self,
        prompt: Sequence[Message],
        tools: list[Any] | None,
        encoder: TurnEncoder,
        read_turn: ReadTurn,
        max_turns: int | None = None,
    ) -> None:
        self._tools, self._encoder, self._read, self._max_turns = tools, encoder, read_turn, max_turns
        self.prompt = list(prompt)
        self.prompt_ids = encoder.prompt_ids(self.prompt, tools)
        self.messages: list[Message] = []
        self.turns = 0

    def read(self, completion_ids: Sequence[int]) -> Message:
        """The message of a turn of the model, which is the last one of `messages` then."""
        # Decoded to be read; what goes on is the ids.
        text = self._encoder.tokenizer.decode(list(self._encoder.content_ids(completion_ids)))
        self.messages.append(self._read(text))
        self.turns += 1
        return self.messages[-1]

    def continued(self, completion_ids: Sequence[int], reply: Reply) -> Continuation:
        """What comes behind the turn that was read last. completion_ids: its tokens."""
        if not reply.messages:
            return Continuation([], True, reply.reward, reply.metrics)
        added = self._encoder.added_ids(completion_ids, self.messages[-1], reply.messages, self._tools)
        self.messages += reply.messages
        return Continuation(added, False, reply.reward, reply.metrics)

    @property
    def is_last(self) -> bool:
        """Whether the turn that was read last is the last one that the model has."""
        return self._max_turns is not None and self.turns >= self._max_turns


class TokenEpisode(TokenConversation):
    """Implements mt_tune.environments.base.Episode by a dialogue."""

    def __init__(
        self, dialogue: Dialogue, encoder: TurnEncoder, read_turn: ReadTurn, max_turns: int | None = None
    ) -> None:
        super().__init__(dialogue.prompt, dialogue.tools, encoder, read_turn, max_turns)
        self._dialogue = dialogue
        self.environment = dialogue.environment

    def after(self, completion_ids: Sequence[int], *, finished: bool = True) -> Continuation:
        message = self.read(completion_ids)
        goes_on = finished and not self.is_last
        answer = self._dialogue.reply(message) if goes_on else self._dialogue.end()
        return self.continued(completion_ids, as_reply(answer))


def plain_turn(text: str) -> Message:
    """A turn without calls of tools."""
    return {"role": "assistant", "content": text}


def turn_reader(template_source: str) -> ReadTurn:
    """Reads turns with calls of tools in the form that a chat template has the model write them.

    Raises ConfigError for a template whose form is not known.
    """
    # mt-tune can do without mt-infer, of which rollouts need the engine.
    from mt_infer.chat.answer_parser import AnswerParser
    from mt_infer.chat.tool_calls.form import form_of_template

    form = form_of_template(template_source)
    if form is None:
        raise ConfigError(
            "the chat template has no form of tool calls that mt reads (`mt plugins --kind tool_call_forms`), in which "
            "the model calls tools: train a model whose template describes them, or name a template that does with "
            "data.chat_template_file (--template)"
        )

    def read(text: str) -> Message:
        parser = AnswerParser(form)
        part = parser.add(text)
        part += parser.finish()
        functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in part.calls]
        listed = [{"type": "function", "function": function} for function in functions]
        thought = {"reasoning_content": part.reasoning} if part.reasoning else {}
        return {"role": "assistant", "content": part.content, **thought, **({"tool_calls": listed} if listed else {})}

    return read
