"""The tokens that a chat template writes between two turns of the model, from the difference of two renderings.

rendered without the tools' answers   ...<|im_start|>assistant\\n{turn}<|im_end|>\\n
rendered with them, for generating    ...<|im_start|>assistant\\n{turn}<|im_end|>\\n<|im_start|>tool...assistant\\n
the model drew                        {turn}<|im_end|>
added, and the only text encoded                         \\n<|im_start|>tool...assistant\\n
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.sft.answers import answer_end
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.datasets.sft.conversations import Conversation
from mt_data.datasets.text_files import bare_encoder
from mt_tune.environments.base import Message

END = re.compile(r"(<[^<>\s]+>)(\s*)\Z")
"""The mark that ends a turn, and what the template writes behind it."""
QUESTION: Message = {"role": "user", "content": "question"}
PROBE = "answer-of-the-episode"
TEXTS = (PROBE, f"<think>\nreasons\n</think>\n\n{PROBE}")
"""Turns with which a template is tried: some write the reasoning only while the turn is the last one."""


@dataclass(frozen=True)
class TurnEnd:
    """mark: the text that ends a turn, and its ids; empty where the template writes none. behind: what it writes after
    the mark before another turn begins."""

    mark: str
    ids: list[int]
    behind: str


class TurnEncoder:
    """Renders and encodes prompts and what comes behind the model's turns.

    keep_dropped_turns: takes a template that writes an earlier turn in another way than the last one; the episode keeps
    the turn's tokens as they were drawn.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, keep_dropped_turns: bool = False) -> None:
        self.template, self.tokenizer = template, tokenizer
        self._keep = keep_dropped_turns
        self._encode = bare_encoder(tokenizer)
        self._eod = answer_end(template, tokenizer)
        self._kept: set[tuple[str, bool]] = set()

    def prompt_ids(self, messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
        """Up to where the model begins."""
        return self._encode(self._rendered(messages, tools, True))

    def added_ids(
        self, turn_ids: Sequence[int], turn: Message, new: Sequence[Message], tools: list[Any] | None
    ) -> list[int]:
        """Tokens behind a turn that the model drew: new messages, up to where it goes on. turn: the message that the
        turn was read as; only the calls in it matter.

        The mark that ends the turn is added where the model did not draw it. Raises ConfigError for a template that
        does not keep earlier turns.
        """
        calls = list(turn.get("tool_calls") or [])
        self._require_kept(new[0], calls, tools)
        end, added = self._added(_turn(TEXTS[1], calls), new, tools)
        drawn = end.ids and list(turn_ids[-len(end.ids) :]) == end.ids
        text = end.behind + added
        return [*([] if drawn else end.ids), *self._encode(text)]

    def content_ids(self, turn_ids: Sequence[int]) -> Sequence[int]:
        """The ids of a turn without the mark that ends it."""
        end = self._end(self._rendered([QUESTION, _turn(TEXTS[0], [])], None, False))
        return turn_ids[: -len(end.ids)] if end.ids and list(turn_ids[-len(end.ids) :]) == end.ids else turn_ids

    # -- renderings ----------------------------------------------------------------------------------

    def _added(self, turn: Message, new: Sequence[Message], tools: list[Any] | None) -> tuple[TurnEnd, str]:
        """How the turn ends, and the text of the new messages behind it."""
        before = self._rendered([QUESTION, turn], tools, False)
        through = self._rendered([QUESTION, turn, *new], tools, True)
        end = self._end(before)
        if through.startswith(before):
            return end, through[len(before) :]
        # The turn is written in another way: its end is the first mark behind what it has in common.
        start = through.rfind(PROBE)
        place = through.find(end.mark, start) if end.mark and start >= 0 else -1
        if place < 0:
            raise ConfigError(f"{self.template.name} leaves out the assistant's turn when another turn follows it")
        return TurnEnd(end.mark, end.ids, ""), through[place + len(end.mark) :]

    def _end(self, rendered: str) -> TurnEnd:
        if self._eod is not None:
            return TurnEnd("", [self._eod], "")
        match = END.search(rendered)
        return TurnEnd("", [], "") if match is None else TurnEnd(match[1], self._encode(match[1]), match[2])

    def _require_kept(self, new: Message, calls: list[Any], tools: list[Any] | None) -> None:
        """Raises ConfigError unless a turn is written alike whatever follows it. Once for each role."""
        role, with_calls = new["role"], bool(calls)
        if self._keep or (role, with_calls) in self._kept:
            return
        for text in TEXTS:
            turn = _turn(text, calls)
            before = self._rendered([QUESTION, turn], tools, False)
            if not self._rendered([QUESTION, turn, new], tools, True).startswith(before):
                what = "with reasoning " if text == TEXTS[1] else ""
                raise ConfigError(
                    f"{self.template.name} does not keep earlier turns: it writes an assistant's turn {what}in another "
                    f"way when a {role} turn follows, so that a model which is trained on the turns it drew would be "
                    "asked with others later. Choose a template that keeps them with data.chat_template_file, or set "
                    "TurnEncoder(keep_dropped_turns=True)"
                )
        self._kept.add((role, with_calls))

    def _rendered(self, messages: Sequence[Message], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        conversation = Conversation(list(messages), tools, "the episode", len(messages))
        try:
            return self.template.render(
                conversation, conversation.messages, add_generation_prompt=add_generation_prompt
            )[0]
        except DataError as error:
            if tools:
                raise ConfigError(f"{error}; environments with tools need a chat template that writes them") from error
            raise


def _turn(text: str, calls: list[Any]) -> Message:
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
