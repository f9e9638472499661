"""What precedes an answer: passages and a question, as tokens that end with a chunk.

The last token of a chunk is the first that attends to the neighbours of the chunk. A prompt is therefore filled up at
its beginning to whole chunks: its last token, which predicts the answer's first, attends to the neighbours of the
prompt's last chunk, and each token of the answer to those of the chunk before its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.retro_sft.records import QARecord
from mt_data.datasets.sft.answers import answer_end, encode_with_cuts
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.datasets.sft.conversations import Message
from mt_data.datasets.text_files import Encode, bare_encoder

BETWEEN = "\n\n"
"""Stands behind each passage."""


@dataclass(frozen=True)
class EncodedAnswer:
    """tokens: of filler, prompt and answer. first: number of the answer's first one, a multiple of the chunk length."""

    tokens: list[int]
    first: int


class PassagePrompts:
    """Encodes questions with passages for one template and one tokenizer.

    chunk_length: of which a prompt is a multiple; 1 for a model without chunks. Raises ConfigError for a tokenizer
    without an id that ends a document where the template or the filler needs one.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, chunk_length: int) -> None:
        self.tokenizer, self.template, self.chunk_length = tokenizer, template, chunk_length
        self.encode = bare_encoder(tokenizer)
        self.filler = filler_of(tokenizer, chunk_length)
        self.eod = answer_end(template, tokenizer)

    def prompt(self, record: QARecord, passages: Sequence[str], longest: int) -> list[int]:
        """Ids before the answer, at most `longest` of them where passages can be cut so far."""
        context = self._fitting(record, passages, longest)
        return self._aligned(self._prompt(record, context))

    def with_answer(self, record: QARecord, passages: Sequence[str], longest: int) -> EncodedAnswer:
        """Ids of the prompt and of the first answer; passages are cut so that there are at most `longest`, which does
        not always suffice. Raises DataError for a record without an answer."""
        if not record.answers:
            raise DataError(f"{record.where} has no answer to train on; leave it out")
        # The length of the answer is needed before passages can be cut; it does not depend on them but for the tokens
        # at the border, which the final encoding below settles.
        _, answer = self._whole(record, "")
        context = self._fitting(record, passages, longest - len(answer))
        prompt, answer = self._whole(record, context)
        aligned = self._aligned(prompt)
        return EncodedAnswer([*aligned, *answer], len(aligned))

    def _fitting(self, record: QARecord, passages: Sequence[str], longest: int) -> str:
        """The passages joined, without what must be cut at their end."""
        context = "".join(passage + BETWEEN for passage in passages)
        # Rounded down to whole chunks, since the prompt is filled up to whole chunks afterwards.
        ids, longest = self.encode(context), longest // self.chunk_length * self.chunk_length
        # Repeated: text that is encoded again after a cut can have a different number of ids. Each round drops one id
        # at least, so the loop ends.
        while ids and (surplus := len(self._prompt(record, context)) - longest) > 0:
            ids = ids[: max(len(ids) - surplus, 0)]
            # A character of several ids may have been cut.
            context = self.tokenizer.decode(ids).rstrip("\ufffd")
            context = context + BETWEEN if context.strip() else ""
            ids = ids if context else []
        return context

    def _prompt(self, record: QARecord, context: str) -> list[int]:
        return self._tokens(*self._text(self._messages(record, context), record))

    def _messages(self, record: QARecord, context: str) -> list[Message]:
        """The context stands before what the user says last."""
        place = max(number for number, message in enumerate(record.messages) if message["role"] == "user")
        last = record.messages[place]
        return [
            *record.messages[:place],
            {**last, "content": context + str(last["content"])},
            *record.messages[place + 1 :],
        ]

    def _text(self, messages: Sequence[Message], record: QARecord) -> tuple[str, list[int]]:
        """The text before the answer, and where in it the document ends: behind the answers of earlier turns."""
        conversation = record.conversation(messages)
        text, _ = self.template.render(conversation, messages, add_generation_prompt=True)
        turns = conversation.turns_of("assistant") if self.eod is not None else []
        return text, [len(self.template.render(conversation, messages[: turn + 1])[0]) for turn in turns]

    def _whole(self, record: QARecord, context: str) -> tuple[list[int], list[int]]:
        """Ids of the prompt and of the answer."""
        messages = self._messages(record, context)
        answered = [*messages, {"role": "assistant", "content": record.answers[0]}]
        before, ends = self._text(messages, record)
        text, _ = self.template.render(record.conversation(answered), answered)
        if not text.startswith(before):
            raise DataError(
                f"{record.where}: {self.template.name} writes the question differently when its answer follows, so "
                "where the answer begins is not clear; choose another data.chat_template"
            )
        # Earlier answers each end with an id that has no text; what follows the last of them is encoded as one text.
        start = ends[-1] if ends else 0
        tokens, (place,) = encode_with_cuts(text[start:], [len(before) - start], self.encode)
        earlier = self._tokens(before[:start], ends)
        eod = [] if self.eod is None else [self.eod]
        return [*earlier, *tokens[:place]], [*tokens[place:], *eod]

    def _tokens(self, text: str, ends: Sequence[int]) -> list[int]:
        ids: list[int] = []
        for start, end in pairwise([0, *ends]):
            assert self.eod is not None
            ids += [*self.encode(text[start:end]), self.eod]
        return [*ids, *self.encode(text[ends[-1] if ends else 0 :])]

    def _aligned(self, prompt: list[int]) -> list[int]:
        return filled_up(prompt, self.chunk_length, self.filler)


def filled_up(prompt: list[int], chunk_length: int, filler: int) -> list[int]:
    """The ids behind as many of `filler` as make them whole chunks."""
    # -n % m is what n lacks to a multiple of m: 0 for n = 0, m, 2 m.
    return [filler] * (-len(prompt) % chunk_length) + prompt


def filler_of(tokenizer: Tokenizer, chunk_length: int) -> int:
    """The id that fills up a prompt: that of the end of a document, else of its start or padding."""
    special = tokenizer.special
    filler = next((token for token in (special.eod, special.bos, special.pad) if token is not None), None)
    if filler is None and chunk_length > 1:
        raise ConfigError(
            "the tokenizer has no eod, bos or pad to fill up a prompt to whole chunks of data.retro_chunk_length="
            f"{chunk_length}; choose another tokenizer"
        )
    return filler or 0


# -- passages as neighbours of chunks ----------------------------------------------------------------


@dataclass(frozen=True)
class NeighborShape:
    """chunk_length: m. num_neighbors: K, of a chunk. retrieved_length: r, tokens of a neighbour."""

    chunk_length: int
    num_neighbors: int
    retrieved_length: int

    def tokens(self, passages: Sequence[str], encode: Encode) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids [K, r] of the first K passages, and 1 for ids, 0 for padding [K, r]."""
        ids = np.zeros((self.num_neighbors, self.retrieved_length), np.int64)
        mask = np.zeros_like(ids)
        for row, passage in enumerate(passages[: self.num_neighbors]):
            passage_ids = encode(passage)[: self.retrieved_length]
            ids[row, : len(passage_ids)] = passage_ids
            mask[row, : len(passage_ids)] = 1
        return ids, mask

    def of_every_chunk(self, neighbors: NDArray[np.int64], positions: int) -> NDArray[np.int64]:
        """[K, r] -> [L, K, r], the same for each whole chunk of so many positions."""
        chunks = positions // self.chunk_length
        return np.broadcast_to(neighbors, (chunks, *neighbors.shape)).copy()
