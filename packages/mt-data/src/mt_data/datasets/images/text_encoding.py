"""Texts and conversations as ids, with images in their places."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from mt_core.errors import ConfigError, DataError
from mt_core.specs import Tokenizer
from mt_data.datasets.images.records import MARK, ImageText
from mt_data.datasets.images.sample import EncodedText
from mt_data.datasets.sft.answers import answer_spans, encode_with_cuts
from mt_data.datasets.sft.chat_templates import ChatTemplate, Span
from mt_data.datasets.sft.conversations import Conversation
from mt_data.datasets.text_files import bare_encoder


class ImageTextEncoder:
    """A text counts whole, a conversation in its answers.

    image: what stands in the place of a mark. Raises ConfigError when the template needs an end-of-document id that
    the tokenizer does not have.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, image: EncodedText) -> None:
        self.template, self.image = template, image
        self.eod = tokenizer.special.eod
        self._encode = bare_encoder(tokenizer)
        if template.eod_after_answer and self.eod is None:
            raise ConfigError(
                f"{template.name} needs an end-of-document id after each answer, and the tokenizer has none; set "
                "data.eod_after_answer=false, or choose another template or tokenizer"
            )

    def __call__(self, pair: ImageText) -> EncodedText:
        """Raises DataError for a conversation without an answer, or whose template leaves an image out."""
        if isinstance(pair.text, Conversation):
            return self._conversation(pair.text, len(pair.images))
        return self._pieces(pair.text, [(0, len(pair.text))], [len(pair.text)])

    def prompt(self, pair: ImageText) -> EncodedText:
        """What is to be continued by the last answer of a conversation; of a text, what is before its last part. The
        tokens are those of training."""
        text = self(pair)
        # The last run of counted tokens is the answer to be continued: first is where it begins.
        last = len(text.counted) - 1 - text.counted[::-1].index(True)
        first = next((place for place in range(last, -1, -1) if not text.counted[place]), -1) + 1
        return EncodedText(text.tokens[:first], text.counted[:first])

    def _conversation(self, conversation: Conversation, images: int) -> EncodedText:
        text, answers = answer_spans(conversation, self.template)
        if not answers:
            raise DataError(f"{conversation.where} has no answer of the assistant, so nothing would be learnt of it")
        if text.count(MARK) != images:
            raise DataError(
                f'{conversation.where}: {self.template.name} writes "{MARK}" {text.count(MARK)} times, and the '
                f"number of images is {images}; correct the template"
            )
        return self._pieces(text, answers, [end for _, end in answers] if self.template.eod_after_answer else [])

    def _pieces(self, text: str, counted: Sequence[Span], ends: Sequence[int]) -> EncodedText:
        """The text is encoded in pieces, cut at marks and at `ends`, behind which the end-of-document id goes."""
        marks = [found.span() for found in re.finditer(re.escape(MARK), text)]
        starts = {start for start, _ in marks}
        whole = EncodedText([], [])
        # Cut at marks, so that no token reaches over an image, and at the ends of answers, as generation ends there.
        for start, end in pairwise(sorted({0, *(cut for mark in marks for cut in mark), *ends, len(text)})):
            whole += self.image if start in starts else self._piece(text, start, end, counted)
            if end in ends and self.eod is not None:
                whole += EncodedText([self.eod], [True])
        return whole

    def _piece(self, text: str, start: int, end: int, counted: Sequence[Span]) -> EncodedText:
        # Counted spans that meet this piece, in characters of the piece.
        within = [(max(a, start) - start, min(b, end) - start) for a, b in counted if a < end and b > start]
        tokens, places = encode_with_cuts(text[start:end], [cut for span in within for cut in span], self._encode)
        learnt = [False] * len(tokens)
        for first, last in zip(places[::2], places[1::2], strict=True):
            learnt[first:last] = [True] * (last - first)
        return EncodedText(tokens, learnt)
