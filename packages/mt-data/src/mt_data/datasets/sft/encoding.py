"""The tokens of a file of conversations, encoded once and kept in the index cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.cache import IndexCache, file_checksum
from mt_data.datasets.sft.answers import (
    ConversationEncoder,
    EncodedConversation,
    PlainTextEncoder,
)
from mt_data.datasets.sft.chat_templates import ChatTemplate, NoChatTemplateError, load_chat_template
from mt_data.datasets.sft.config import SFTDataConfig
from mt_data.datasets.sft.conversations import Conversation, PlainText, place
from mt_data.datasets.sft.record_files import read_examples
from mt_data.datasets.sft.record_formats import Example, RecordReader
from mt_data.preprocess.readers import expand_globs

FORMAT = 3
"""Raised when the same files give other arrays than before."""
_REPORT_SECONDS = 10.0
_BATCH = 4096
_SKIPPED_SHOWN = 10
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversations:
    """All conversations of some files, in order.

    tokens int32 [all tokens], answer bool [all tokens]: True where a token counts in the loss;
    bounds int64 [conversations + 1]; first int64 [conversations]: place of the first token that counts, apart
    from the very first token, which is never predicted (no place of the conversation when there is none);
    file int32 and line int64 [conversations]: where each stands. skipped int64 [skipped lines, 2]: file and line of
    what was left out.
    """

    tokens: NDArray[np.int32]
    answer: NDArray[np.bool_]
    bounds: NDArray[np.int64]
    first: NDArray[np.int64]
    file: NDArray[np.int32]
    line: NDArray[np.int64]
    skipped: NDArray[np.int64]
    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def tokens_of(self, number: int, limit: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The first `limit` tokens of a conversation, and which of them count."""
        start = int(self.bounds[number])
        end = min(int(self.bounds[number + 1]), start + limit)
        return self.tokens[start:end], self.answer[start:end]

    def where(self, number: int) -> str:
        return place(str(self.paths[self.file[number]]), int(self.line[number]))


def load_conversations(
    pattern: str, config: SFTDataConfig, tokenizer: Tokenizer, cache: IndexCache
) -> tuple[Conversations, dict[str, Any]]:
    """The encoded conversations of the files that `pattern` names, and the cache key that stands for them.

    Raises DataError for missing files and, unless data.on_error is "skip", for the first line that is no usable
    conversation.
    """
    paths = expand_globs([pattern])
    template = read_template(config, tokenizer)
    key = {
        "sft_conversations": FORMAT,
        "files": [file_checksum(path) for path in paths],
        "tokenizer": tokenizer.fingerprint(),
        "template": None if isinstance(template, NoChatTemplateError) else template.fingerprint(),
        "record_format": config.record_format,
        "split_answers": config.split_answers,
        "messages_key": config.messages_key,
        "train_on": config.train_on,
        "on_error": config.on_error,
    }
    arrays = cache.get(key, lambda: _encode_files(paths, config, template, tokenizer))
    conversations = Conversations(**arrays, paths=paths)
    if count := len(conversations.skipped):
        file, line = conversations.skipped[0].tolist()
        log.warning('data.on_error="skip": lines left out: %d; the first is %s, line %d', count, paths[file], line)
    return conversations, key


Template = ChatTemplate | NoChatTemplateError


def read_template(config: SFTDataConfig, tokenizer: Tokenizer) -> Template:
    """The template, or the error that a conversation raises: plain texts need none."""
    try:
        return load_chat_template(config.chat_template, config.chat_template_file, tokenizer, config.eod_after_answer)
    except NoChatTemplateError as error:
        return error


class ExampleEncoder:
    """Encodes conversations and plain texts, as the configuration says which of their tokens count."""

    def __init__(self, config: SFTDataConfig, template: Template, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._all = config.train_on == "all"
        self._last, self._split = config.train_on == "last_answer", config.split_answers
        self._reported = self._reported_texts = False

    def encoded(self, example: Example) -> list[EncodedConversation]:
        """Raises DataError for a record that cannot be used, ConfigError for a template or tokenizer that cannot."""
        if isinstance(example, PlainText):
            self._report_texts(example)
            return self._texts.encoded(example, everything=self._all)
        if self._all:
            return [self._conversations.everything(example)]
        encoded = self._conversations.encoded(example)
        self._report_missing_end(example)
        return encoded

    @cached_property
    def _texts(self) -> PlainTextEncoder:
        return PlainTextEncoder(self._tokenizer)

    @cached_property
    def _conversations(self) -> ConversationEncoder:
        if isinstance(self._template, NoChatTemplateError):
            raise self._template
        _report_split_markers(self._template, self._tokenizer)
        answers: Literal["all", "last"] = "last" if self._last else "all"
        return ConversationEncoder(self._template, self._tokenizer, answers=answers, split=self._split)

    def _report_texts(self, text: PlainText) -> None:
        """Once, of the first prompt that a chat template does not apply to."""
        if self._reported_texts or not text.prompt or not isinstance(self._template, ChatTemplate):
            return
        self._reported_texts = True
        log.warning(
            "%s: prompt and answer are texts, which the model has as they are, without the chat template %s; records "
            "of messages go through it",
            text.where,
            self._template.name,
        )

    def _report_missing_end(self, conversation: Conversation) -> None:
        """Once, of the first conversation."""
        template = self._conversations.template
        if self._reported or template.eod_after_answer or self._conversations.end_mark is not None:
            return
        self._reported = True
        log.warning(
            "%s: the chat template %s writes no mark behind an answer that ends it, so that the model does not "
            "learn to stop; set data.eod_after_answer=true to put the end-of-document id there",
            conversation.where,
            template.name,
        )


def _encode_files(
    paths: Sequence[Path], config: SFTDataConfig, template: Template, tokenizer: Tokenizer
) -> dict[str, NDArray[Any]]:
    encoder = ExampleEncoder(config, template, tokenizer)
    bad_lines = BadLines(config.on_error)
    gathered = Gathered()
    started = reported = time.monotonic()
    for file, example in _read(paths, config, bad_lines):
        try:
            encodings = encoder.encoded(example)
        except DataError as error:
            bad_lines.add(file, example.line, _placed(error, example))
            continue
        for encoded in encodings:
            gathered.add(encoded, file, example.line)
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            rate = gathered.count / (reported - started)
            log.info("encoded %d conversations (%.0f/s), at %s", gathered.count, rate, example.where)
    if not gathered.count:
        raise DataError(f"{', '.join(map(str, paths))} holds no conversation; each line must be one")
    return gathered.arrays() | {"skipped": np.array(bad_lines.places, np.int64).reshape(-1, 2)}


def _read(paths: Sequence[Path], config: SFTDataConfig, bad_lines: BadLines) -> Iterator[tuple[int, Example]]:
    for file, path in enumerate(paths):
        reader = RecordReader(config.record_format, config.messages_key)
        for example in read_examples(path, reader, partial(bad_lines.add, file)):
            yield file, example
        log.info("%s: records of the format %s", path, reader.format)


def _placed(error: DataError, conversation: Example) -> DataError:
    """The error with file and line, which a tokenizer that refuses a text does not know."""
    text = str(error)
    return error if text.startswith(conversation.where) else DataError(f"{conversation.where}: {text}")


class BadLines:
    """Lines that are no usable conversation: the first one ends the reading, or (on_error "skip") they are counted."""

    def __init__(self, on_error: str) -> None:
        self._on_error = on_error
        self.places: list[tuple[int, int]] = []

    def add(self, file: int, line: int, error: DataError) -> None:
        if self._on_error == "raise":
            raise DataError(f'{error}; correct the line, or leave such lines out with data.on_error="skip"') from error
        self.places.append((file, line))
        if len(self.places) <= _SKIPPED_SHOWN:
            log.warning("left out: %s", error)


def _report_split_markers(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    for marker in template.markers:
        if (ids := len(tokenizer.encode(marker))) != 1:
            log.warning(
                "the tokenizer writes %s of the chat template %s with %d ids in place of one; the model must "
                "learn it as ordinary text",
                marker,
                template.name,
                ids,
            )


class Gathered:
    """Conversations on their way into flat arrays; joined now and then, so that small arrays do not pile up."""

    def __init__(self) -> None:
        self.count = 0
        self._tokens: list[NDArray[np.int32]] = []
        self._answer: list[NDArray[np.bool_]] = []
        self._places: list[tuple[int, int, int, int]] = []

    def add(self, encoded: EncodedConversation, file: int, line: int) -> None:
        self._tokens.append(encoded.tokens.astype(np.int32))
        self._answer.append(encoded.answer)
        # Without the first token, which no position predicts; + 1 gives places in the conversation again.
        counted = np.flatnonzero(encoded.answer[1:])
        first = int(counted[0]) + 1 if len(counted) else len(encoded.tokens)
        self._places.append((len(encoded.tokens), first, file, line))
        self.count += 1
        if self.count % _BATCH == 0:
            # An array object costs some 100 bytes beside its content, as much as a short conversation.
            self._tokens[-_BATCH:] = [np.concatenate(self._tokens[-_BATCH:])]
            self._answer[-_BATCH:] = [np.concatenate(self._answer[-_BATCH:])]

    def arrays(self) -> dict[str, NDArray[Any]]:
        # [4, conversations]; rows of a transposed array are strided, hence the copies below.
        lengths, first, files, lines = np.array(self._places, np.int64).T
        return {
            "tokens": np.concatenate(self._tokens),
            "answer": np.concatenate(self._answer),
            "bounds": np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            "first": first.copy(),
            "file": files.astype(np.int32),
            "line": lines.copy(),
        }
