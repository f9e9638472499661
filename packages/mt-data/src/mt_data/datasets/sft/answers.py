"""The tokens of a conversation, and which of them the assistant wrote.

An answer is what a template adds to the prompt that it writes for generating it: everything from the end of
the rendered generation prompt to the end of the rendered turn, the mark that ends the turn included. So the
mask follows positions, and no token is in or out of it because of its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.sft.chat_templates import ChatTemplate, Span
from mt_data.datasets.sft.conversations import Conversation
from mt_data.datasets.text_files import Encode, bare_encoder


@dataclass(frozen=True)
class EncodedConversation:
    """tokens [n] and answer bool [n], True for the tokens that count in the loss."""

    tokens: NDArray[np.int64]
    answer: NDArray[np.bool_]


class ConversationEncoder:
    """Renders and encodes conversations with one template and one tokenizer.

    Raises ConfigError when the template needs an end-of-document id that the tokenizer does not have.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template = template
        self._encode = bare_encoder(tokenizer)
        self._eod = answer_end(template, tokenizer)

    def answers(self, conversation: Conversation) -> EncodedConversation:
        """The tokens, those of the answers marked.

        Raises DataError, naming file and line, for a conversation without an answer, for one whose template
        leaves nothing unmarked although there is a user's turn, and for a template that writes a turn in another way
        when more turns follow it.
        """
        where, name = conversation.where, self.template.name
        if not conversation.turns_of("assistant"):
            raise DataError(
                f"{where} has no assistant turn, so nothing would be learnt of it; remove the line, or train on all "
                'tokens with data.train_on="all"'
            )
        encoded = self._with_spans(*answer_spans(conversation, self.template))
        if not encoded.answer.any():
            raise DataError(f"{where}: {name} writes nothing for the assistant's turns; correct the template")
        if encoded.answer.all() and conversation.turns_of("user"):
            raise DataError(
                f"{where}: {name} marks all tokens as answers, the user's too; correct the template, or train on all "
                'tokens on purpose with data.train_on="all"'
            )
        return encoded

    def everything(self, conversation: Conversation) -> EncodedConversation:
        """The tokens, all of them marked."""
        if self._eod is not None and conversation.turns_of("assistant"):
            tokens = self._with_spans(*answer_spans(conversation, self.template)).tokens
        else:
            text, _ = self.template.render(conversation, conversation.messages)
            tokens = np.array(self._encode(text), np.int64)
        return EncodedConversation(tokens, np.ones(len(tokens), np.bool_))

    def _with_spans(self, text: str, spans: Sequence[Span]) -> EncodedConversation:
        # No id without text in between: the whole conversation is encoded as one text, and spans of characters become
        # spans of ids.
        if self._eod is None:
            tokens, places = encode_with_cuts(text, [cut for span in spans for cut in span], self._encode)
            return _marked(tokens, list(zip(places[::2], places[1::2], strict=True)))
        # The text is encoded up to each answer's end, as generation would leave it.
        tokens, marked, done = [], [], 0
        for start, end in spans:
            piece, (place,) = encode_with_cuts(text[done:end], [start - done], self._encode)
            # + 1: the end-of-document id is part of the answer, so that the model learns to stop.
            marked.append((len(tokens) + place, len(tokens) + len(piece) + 1))
            tokens += [*piece, self._eod]
            done = end
        return _marked([*tokens, *self._encode(text[done:])], marked)


def answer_end(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The id behind each answer, if the template leaves it to the tokenizer. Raises ConfigError for one without it."""
    if template.eod_after_answer and tokenizer.special.eod is None:
        raise ConfigError(
            f"{template.name} needs an end-of-document id after each answer, and the tokenizer has none; set "
            "data.eod_after_answer=false, or choose another template or tokenizer"
        )
    return tokenizer.special.eod if template.eod_after_answer else None


def answer_spans(conversation: Conversation, template: ChatTemplate) -> tuple[str, list[Span]]:
    """The rendered text and the characters of each answer, in order, without overlap."""
    messages = conversation.messages
    text, marked = template.render(conversation, messages)
    if template.has_marks:
        return text, [span for span in marked if span[0] < span[1]]
    spans = []
    for turn in conversation.turns_of("assistant"):
        prompt, _ = template.render(conversation, messages[:turn], add_generation_prompt=True)
        through, _ = template.render(conversation, messages[: turn + 1])
        # Three renderings must be prefixes of one another: up to the generation prompt, through the answer, and the
        # whole. Templates that drop the reasoning of earlier turns, for example, break this.
        if not (through.startswith(prompt) and text.startswith(through)):
            raise _not_a_prefix(conversation, template, turn, prompt, through, text)
        spans.append((len(prompt), len(through)))
    return text, [span for span in spans if span[0] < span[1]]


def _not_a_prefix(
    conversation: Conversation, template: ChatTemplate, turn: int, prompt: str, through: str, text: str
) -> DataError:
    shorter, longer = (prompt, through) if not through.startswith(prompt) else (through, text)
    same = _common_length(shorter, longer)
    return DataError(
        f"{conversation.where}: {template.name} writes the conversation up to message {turn + 1} differently "
        f"when more follows ({shorter[same : same + 20]!r} becomes {longer[same : same + 20]!r} at character "
        f"{same}), so where the answer begins or ends is not clear; put {{% generation %}} and "
        "{% endgeneration %} around the answer in the template (data.chat_template_file), split the "
        "conversation into one line an answer, or choose another data.chat_template"
    )


def _marked(tokens: list[int], spans: Sequence[Span]) -> EncodedConversation:
    answer = np.zeros(len(tokens), np.bool_)
    for start, end in spans:
        answer[start:end] = True
    return EncodedConversation(np.array(tokens, np.int64), answer)


def encode_with_cuts(text: str, cuts: Sequence[int], encode: Encode) -> tuple[list[int], list[int]]:
    """Ids of the whole text, and how many of them stand before each of the (rising) characters `cuts`.

    A token that reaches across a cut counts as after it.
    """
    tokens = encode(text)
    bounds = [0, *cuts, len(text)]
    # First attempt: encode the pieces between the cuts. If together they are the ids of the whole, the counts are
    # exact.
    pieces = [encode(text[start:end]) for start, end in pairwise(bounds)]
    if [token for piece in pieces for token in piece] == tokens:
        return tokens, np.cumsum([len(piece) for piece in pieces])[: len(cuts)].tolist()
    # Pieces are encoded otherwise than the whole (a merge across a cut, a space put before each text).
    # Second: what the ids of the text before the cut have in common with those of the whole stands before the cut.
    return tokens, [_common_length(tokens, encode(text[:cut])) for cut in cuts]


def _common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common beginning."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
