"""Talking to a model in this process."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mt_core.errors import ConfigError
from mt_infer.chat.answer_parser import AnswerPart
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.chat.partners import ChatSettings, Message, ReasoningText
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator


class LocalModel:
    """A model in this process."""

    def __init__(self, name: str, generator: TextGenerator, chat: ChatFormat) -> None:
        self.name, self.generator, self.chat = name, generator, chat

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Generator[str, None, None]:
        prompt = self.chat.prompt(messages)
        room = self.generator.longest - len(prompt)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(prompt)} tokens, and the model takes {self.generator.longest}; /reset it"
            )
        values: dict[str, Any] = {
            **asdict(settings),
            "max_tokens": min(settings.max_tokens or room, room),
            "stop": self.chat.stop,
            "stop_token_ids": self.chat.stop_token_ids,
        }
        parser = self.chat.parser(prompt)
        for text in self.generator.stream(prompt, SamplingParameters(**values)):
            yield from _texts(parser.add(text))
        yield from _texts(parser.finish())


def _texts(part: AnswerPart) -> Iterator[str]:
    if part.reasoning:
        yield ReasoningText(part.reasoning)
    if part.content:
        yield part.content
