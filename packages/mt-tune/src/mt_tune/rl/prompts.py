"""A data set of prompts: what the policy completes, with the other columns of each record for rewards."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.interfaces import Dataset, SplitRequest, Tokenizer
from mt_data.datasets.cache import combined, file_checksum
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.sft.answers import end_ids
from mt_data.datasets.sft.chat_templates import ChatTemplate, NoChatTemplateError, load_chat_template
from mt_data.datasets.sft.conversations import Conversation, Message, check_messages, place
from mt_data.datasets.sft.encoding import BadLines
from mt_data.datasets.sft.record_files import read_examples
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import TextSource, bare_encoder, build_from_text, ids_around
from mt_data.preprocess.readers import Record, expand_globs
from mt_tune.rl.config import PromptDataConfig
from mt_tune.rl.samples import PROMPT

PROMPT_KEYS = ("prompt", "messages")
Key = tuple[int, int]
"""A prompt's file, as a hash of its path, and its line."""


@dataclass(frozen=True)
class Prompt:
    """tokens: up to where the completion begins. content: the text or the messages of the record. columns: its other
    values."""

    tokens: tuple[int, ...]
    content: str | list[Message]
    columns: Mapping[str, Any]
    file: str
    line: int

    @property
    def key(self) -> Key:
        return zlib.crc32(self.file.encode()), self.line

    @property
    def where(self) -> str:
        return place(self.file, self.line)


@dataclass(frozen=True)
class PromptRecord:
    """A record before it is encoded."""

    content: str | list[Message]
    columns: Mapping[str, Any]
    file: str
    line: int

    @property
    def where(self) -> str:
        return place(self.file, self.line)


class PromptReader:
    """Turns the records of one file into prompts (the interface of RecordReader)."""

    def example(self, record: Record) -> PromptRecord:
        """Raises DataError, naming the record, for one that has no prompt, or an empty one."""
        where, fields = place(record.file, record.line), record.value
        named = [key for key in PROMPT_KEYS if fields.get(key) is not None]
        if len(named) != 1:
            raise DataError(
                f'{where} has {" and ".join(named) or "no prompt"}; a record has either "prompt" (a text or messages) '
                f'or "messages"; its keys are {", ".join(fields)}'
            )
        columns = {name: value for name, value in fields.items() if name != named[0]}
        return PromptRecord(_content(fields[named[0]], named[0], where), columns, record.file, record.line)


def _content(value: Any, key: str, where: str) -> str | list[Message]:
    if isinstance(value, str):
        if not value:
            raise DataError(f'{where}: "{key}" is empty; a completion needs something to complete')
        return value
    messages = check_messages(value, key, where)
    last = messages[-1]
    if not any((message.get("content") or "").strip() for message in messages) or (
        last["role"] == "user" and not last["content"].strip()
    ):
        raise DataError(
            f'{where}: message {len(messages)} of "{key}" ({last["role"]}) has no text; a completion needs something '
            "to complete"
        )
    if last["role"] == "assistant":
        raise DataError(f'{where}: "{key}" ends with an answer; remove it, since the policy writes one')
    return messages


class PromptEncoder:
    """Encodes prompts; `ends`: the ids that end a completion."""

    def __init__(self, config: PromptDataConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._encode = bare_encoder(tokenizer)
        self._before, _ = ids_around(tokenizer)
        self.template = prompt_template(config, tokenizer)

    def encoded(self, record: PromptRecord) -> Prompt:
        """Raises ConfigError for messages without a template, and for texts where it is not clear that they go without
        one."""
        content = record.content
        if isinstance(content, str):
            content = self._text(content, record.where)
        tokens = self._before + self._encode(content) if isinstance(content, str) else self._messages(content, record)
        if not tokens:
            raise DataError(f"{record.where}: the prompt has no token")
        return Prompt(tuple(tokens), content, record.columns, record.file, record.line)

    def _text(self, text: str, where: str) -> str | list[Message]:
        if self.config.prompt_format == "user_message":
            return [{"role": "user", "content": text}]
        if self.config.prompt_format is None and isinstance(self.template, ChatTemplate):
            raise DataError(
                f"{where}: the prompt is a text, and a chat template is there, which texts do not go through; set "
                'data.prompt_format="user_message" to make it the message of a user, or "text" to complete it as it is'
            )
        return text

    def _messages(self, messages: Sequence[Message], record: PromptRecord) -> list[int]:
        if isinstance(self.template, NoChatTemplateError):
            raise self.template
        tools = record.columns.get("tools")
        conversation = Conversation(
            list(messages), tools if isinstance(tools, list) else None, record.file, record.line
        )
        text, _ = self.template.render(conversation, conversation.messages, add_generation_prompt=True)
        return self._encode(text)


def prompt_template(config: PromptDataConfig, tokenizer: Tokenizer) -> ChatTemplate | NoChatTemplateError:
    try:
        return load_chat_template(config.chat_template, config.chat_template_file, tokenizer, config.eod_after_answer)
    except NoChatTemplateError as error:
        return error


def completion_ends(config: PromptDataConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a completion: the end of a document, and the mark that the template writes behind an answer."""
    template, special = prompt_template(config, tokenizer), tokenizer.special
    marks = end_ids(template, tokenizer) if isinstance(template, ChatTemplate) else []
    return frozenset([*marks, *(id_ for id_ in (special.eod, special.eos) if id_ is not None)])


class PromptDataset:
    """Sample k is the prompt `order[k]`."""

    def __init__(
        self, prompts: Sequence[Prompt], order: NDArray[np.int64], length: int, content: Mapping[str, Any]
    ) -> None:
        self.prompts, self.order, self.length, self.content = prompts, order, length, content

    def __len__(self) -> int:
        return len(self.order)

    def prompt(self, index: int) -> Prompt:
        return self.prompts[int(self.order[index])]

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        prompt = self.prompt(index)
        tokens = np.zeros(self.length, np.int64)
        tokens[: len(prompt.tokens)] = prompt.tokens
        mask = np.zeros(self.length, np.float32)
        mask[len(prompt.tokens) - 1] = 1.0
        return {"tokens": tokens, "labels": np.zeros_like(tokens), "loss_mask": mask, PROMPT: np.array(prompt.key)}

    def fingerprint(self) -> str:
        return combined([self.content])

    def describe(self, index: int) -> str:
        return self.prompt(index).where


def prompts_of(dataset: Dataset) -> Iterator[Prompt]:
    """All prompts of a data set, a blend of several ones, or epochs of one."""
    if isinstance(dataset, PromptDataset):
        yield from dataset.prompts
        return
    for part in (getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())):
        if part is not None:
            yield from prompts_of(part)


def build_prompts(config: PromptDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of PROMPT_SAMPLE, in whole epochs; None for a split without data. Raises DataError for unusable
    records."""

    def make(source: TextSource, num_samples: int | None) -> PromptDataset:
        prompts, key = load_prompts(source.name, config, tokenizer, request.sequence_length)
        within = source.elements(len(prompts), "prompts")
        chosen = prompts[within.start : within.stop]
        order = epoch_order(len(chosen), num_samples, request.seed)
        return PromptDataset(chosen, order, request.sequence_length, key)

    return build_from_text(config, request, make)


def load_prompts(
    pattern: str, config: PromptDataConfig, tokenizer: Tokenizer, length: int
) -> tuple[list[Prompt], dict[str, Any]]:
    """The prompts of the files that `pattern` names, and what stands for their content."""
    paths = expand_globs([pattern])
    encoder, bad_lines = PromptEncoder(config, tokenizer), BadLines(config.on_error)
    prompts: list[Prompt] = []
    for number, path in enumerate(paths):
        for record in read_examples(path, PromptReader(), partial(bad_lines.add, number)):
            try:
                prompt = encoder.encoded(record)
                _require_room(prompt, length)
            except DataError as error:
                bad_lines.add(number, record.line, error)
                continue
            prompts.append(prompt)
    if not prompts:
        raise DataError(f"{', '.join(map(str, paths))} holds no prompt; each record must be one")
    return prompts, _identity(paths, config, encoder)


def _require_room(prompt: Prompt, length: int) -> None:
    if len(prompt.tokens) > length:
        raise DataError(
            f"{prompt.where}: the prompt has {len(prompt.tokens)} tokens, which leave no room in data.seq_length="
            f"{length}; make it larger"
        )


def _identity(paths: Sequence[Path], config: PromptDataConfig, encoder: PromptEncoder) -> dict[str, Any]:
    template = encoder.template
    return {
        "prompts": 1,
        "files": [file_checksum(path) for path in paths],
        "tokenizer": encoder.tokenizer.fingerprint(),
        "template": template.fingerprint() if isinstance(template, ChatTemplate) else None,
        "format": config.prompt_format,
    }
