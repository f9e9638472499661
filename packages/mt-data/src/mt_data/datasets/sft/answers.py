"""The tokens of a conversation, and which of them the assistant wrote.

An answer is what a template adds to the prompt that it writes for generating it: everything from the end of
the rendered generation prompt to the end of the rendered turn, the mark that ends the turn included. So the
mask follows positions, and no token is in or out of it because of its value.

    text    <user>2+2?<end><assistant>4<end>      <assistant> is the generation prompt
    mask    00000000000000000000000000111111
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.sft.chat_templates import ChatTemplate, Span
from mt_data.datasets.sft.conversations import Conversation, PlainText
from mt_data.datasets.text_files import Encode, bare_encoder, ids_around

END_MARK = re.compile(r"\s*(<[^<>\s]+>)")
"""A mark such as <|im_end|> or </s>."""
PROBE = "answer"
CONVERSATION = ({"role": "user", "content": "question"}, {"role": "assistant", "content": PROBE})


@dataclass(frozen=True)
class EncodedConversation:
    """tokens [n] and answer bool [n], True for the tokens that count in the loss."""

    tokens: NDArray[np.int64]
    answer: NDArray[np.bool_]


class ConversationEncoder:
    """Renders and encodes conversations with one template and one tokenizer.

    answers: which of the trained turns count, "all" or "last". split: encode each answer by itself, with the
    conversation before it rendered as for generating it.
    Raises ConfigError when the template needs an end-of-document id that the tokenizer does not have.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        answers: Literal["all", "last"] = "all",
        split: bool = False,
    ) -> None:
        self.template = template
        self.last_alone = answers == "last"
        self.split = split
        self.end_mark = written_end_mark(template)
        self._encode = bare_encoder(tokenizer)
        self._eod = answer_end(template, tokenizer)

    def encoded(self, conversation: Conversation) -> list[EncodedConversation]:
        """The conversation with its answers marked, or one for each answer where they are split. Raises DataError as
        `answers`."""
        turns = conversation.trained_turns()[-1 if self.last_alone else 0 :]
        chosen = replace(conversation, trained=frozenset(turns))
        if not self.split:
            return [self.answers(chosen)]
        parts = [
            replace(chosen, messages=chosen.messages[: turn + 1], trained=frozenset([turn])) for turn in turns
        ] or [chosen]
        return [self.answers(part) for part in parts]

    def answers(self, conversation: Conversation) -> EncodedConversation:
        """The tokens, those of the answers marked.

        Raises DataError, naming file and line, for a conversation without an answer, for one whose template
        leaves nothing unmarked although there is a user's turn, and for a template that writes a turn in another way
        when more turns follow it.
        """
        where, name = conversation.where, self.template.name
        if not conversation.trained_turns():
            what = "no assistant turn" if not conversation.turns_of("assistant") else "no assistant turn to be trained"
            raise DataError(
                f"{where} has {what}, so nothing would be learnt of it; remove the line, or train on all "
                'tokens with data.train_on="all"'
            )
        encoded = self._with_spans(*self._spans(conversation))
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

    def _spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        text, spans = answer_spans(conversation, self.template)
        if not self.template.has_marks or self.end_mark is None:
            return text, spans
        # A template's own marks may end before the end mark, which a model has to learn to stop.
        return text, [(start, self._behind_end_mark(text, end)) for start, end in spans]

    def _behind_end_mark(self, text: str, end: int) -> int:
        mark = END_MARK.match(text, end)
        return mark.end() if mark is not None and mark[1] == self.end_mark else end

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


class PlainTextEncoder:
    """Encodes texts without a template: the ids that the tokenizer puts before a text, the text, and the end of a
    document, which counts in the loss."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = bare_encoder(tokenizer)
        self._before, _ = ids_around(tokenizer)
        special = tokenizer.special
        self._end = special.eod if special.eod is not None else special.eos

    def encoded(self, text: PlainText, *, everything: bool = False) -> list[EncodedConversation]:
        """The tokens, the completion's marked (everything: all). Raises ConfigError without an end of a document."""
        if self._end is None:
            raise ConfigError(
                f"{text.where}: the tokenizer has no end-of-document id, so that a model would not learn where a text "
                "ends; choose another tokenizer, or write the records as messages"
            )
        ids, (cut,) = encode_with_cuts(text.prompt + text.completion, [len(text.prompt)], self._encode)
        tokens = [*self._before, *ids, self._end]
        start = 0 if everything or not text.prompt else len(self._before) + cut
        return [_marked(tokens, [(start, len(tokens))])]


def answer_end(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The id behind each answer, if the template leaves it to the tokenizer. Raises ConfigError for one without it."""
    if template.eod_after_answer and tokenizer.special.eod is None:
        raise ConfigError(
            f"{template.name} needs an end-of-document id after each answer, and the tokenizer has none; set "
            "data.eod_after_answer=false, or choose another template or tokenizer"
        )
    return tokenizer.special.eod if template.eod_after_answer else None


def answer_spans(conversation: Conversation, template: ChatTemplate) -> tuple[str, list[Span]]:
    """The rendered text and the characters of each trained answer, in order, without overlap."""
    messages = conversation.messages
    text, marked = template.render(conversation, messages)
    if template.has_marks:
        return text, [span for span in _of_trained(marked, conversation, template) if span[0] < span[1]]
    spans = []
    for turn in conversation.trained_turns():
        prompt, _ = template.render(conversation, messages[:turn], add_generation_prompt=True)
        through, _ = template.render(conversation, messages[: turn + 1])
        # Three renderings must be prefixes of one another: up to the generation prompt, through the answer, and the
        # whole. Templates that drop the reasoning of earlier turns, for example, break this.
        start = len(prompt)
        if not through.startswith(prompt):
            # A generation prompt may go on where the rendered turn does not: it opens a block of reasoning, say. What
            # both have is no answer, as long as it has all turns before.
            start = _common_length(prompt, through)
            before, _ = template.render(conversation, messages[:turn])
            if not (start >= len(before) and through.startswith(before)):
                raise _not_a_prefix(conversation, template, turn, prompt, through, text)
        if not text.startswith(through):
            raise _not_a_prefix(conversation, template, turn, prompt, through, text)
        spans.append((start, len(through)))
    return text, [span for span in spans if span[0] < span[1]]


def _of_trained(marked: list[Span], conversation: Conversation, template: ChatTemplate) -> list[Span]:
    """Spans of the trained turns, among those that a template marks, one for each answer."""
    turns = conversation.turns_of("assistant")
    if (trained := conversation.trained_turns()) == turns:
        return marked
    if len(marked) != len(turns):
        raise DataError(
            f"{conversation.where}: {template.name} marks {len(marked)} spans with {{% generation %}} for "
            f"{len(turns)} assistant turns, so that it is not clear which belong to the trained turns; put one "
            "mark around each answer in the template"
        )
    return [span for turn, span in zip(turns, marked, strict=True) if turn in trained]


def _not_a_prefix(
    conversation: Conversation, template: ChatTemplate, turn: int, prompt: str, through: str, text: str
) -> DataError:
    shorter, longer = (prompt, through) if not through.startswith(prompt) else (through, text)
    same = _common_length(shorter, longer)
    return DataError(
        f"{conversation.where}: {template.name} writes the conversation up to message {turn + 1} differently "
        f"when more follows ({shorter[same : same + 20]!r} becomes {longer[same : same + 20]!r} at character "
        f"{same}), so where the answer begins or ends is not clear; put {{% generation %}} and "
        "{% endgeneration %} around the answer in the template (data.chat_template_file), train each answer by "
        "itself with data.split_answers=true, or choose another data.chat_template"
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


# -- the ends of answers -----------------------------------------------------------------------------


def written_end_mark(template: ChatTemplate) -> str | None:
    """The mark that a template writes behind an answer. A template that refuses the probe has none."""
    try:
        text, _ = template.render(Conversation([*CONVERSATION], None, "the probe", 1), CONVERSATION)
    except DataError:
        return None
    mark = END_MARK.match(text.rpartition(PROBE)[2]) if PROBE in text else None
    return None if mark is None else mark[1]


def end_ids(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """The ids that end an answer in training: of the template's mark, where that is one token, and of
    the end of a document."""
    mark = written_end_mark(template)
    ids = [] if mark is None else bare_encoder(tokenizer)(mark)
    eod = tokenizer.special.eod if template.eod_after_answer else None
    return [*(ids if len(ids) == 1 else ()), *([] if eod is None else [eod])]
