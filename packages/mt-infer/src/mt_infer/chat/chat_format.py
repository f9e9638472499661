"""The form of a model's conversations: its chat template, and the marks that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import HasTokenBytes, Tokenizer
from mt_core.plugins import PluginHost
from mt_data.datasets.images.records import MARK
from mt_data.datasets.sft.answers import CONVERSATION, END_MARK, PROBE
from mt_data.datasets.sft.chat_templates import (
    BUILTIN_TEMPLATES,
    OF_TOKENIZER,
    ChatTemplate,
    NoChatTemplateError,
    load_chat_template,
)
from mt_data.datasets.sounds.rules import MARK as SOUND_MARK
from mt_data.datasets.text_files import bare_encoder
from mt_infer.chat.answer_parser import AnswerParser
from mt_infer.chat.history import (
    SHAPES,
    CallShape,
    is_written,
    probe_messages,
    shaped_history,
    with_tools_of_system,
)
from mt_infer.chat.partners import Message
from mt_infer.chat.reasoning import is_open, reasoning_key, reasoning_of_template
from mt_infer.chat.template_process import TemplateProcess
from mt_infer.chat.tool_calls.constraint import AnswerBeginning
from mt_infer.chat.tool_calls.form import Function, form_of_template

NAMES = (OF_TOKENIZER, *BUILTIN_TEMPLATES)
"""Templates that --chat-template takes beside files."""
RESERVED = ("messages", "tools", "self", "raise_exception", "strftime_now")
"""Names that a template has from the conversation and from its language."""
LONGEST_MARK = 64
"""Tokens at the end of a prompt, among which is the mark that opens the reasoning."""
WITHOUT_PROMPT = {"add_generation_prompt": False}
Content = str | Sequence[Mapping[str, Any]] | None


class ChatFormat:
    """Messages to the tokens of a prompt. stop: texts, stop_token_ids: ids, that the template ends an answer with.
    calls: the form of tool calls, and reasoning: the marks of what is thought, that the template shows, or None.

    A message's content is a text or a list of OpenAI's parts, {"type": "text", "text"} or {"type": "image"}; templates
    are given the form that they were written for. In the text of a prompt MARK stands for an image.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        seconds: float = 5.0,
        host: PluginHost | None = None,
        tool_call_form: str | None = None,
    ) -> None:
        self.source, self.tokenizer = template.source, tokenizer
        self.calls = form_of_template(template.source, host, tool_call_form)
        self.reasoning = reasoning_of_template(template.source)
        self._special = template.special_tokens
        self._process = TemplateProcess(template.source, template.name, seconds=seconds)
        # Templates write BOS themselves.
        self.encode = bare_encoder(tokenizer)
        self._takes_parts = False
        self.stop: tuple[str, ...] = ()
        self.stop_token_ids: tuple[int, ...] = ()
        self._find_end()
        for mark in () if self.calls is None else self.calls.stop:
            if mark in self.source:
                self._add_stop(mark)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids up to where the answer begins. See `text`."""
        return self.encode(self.text(messages, tools, options))

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt up to where the answer begins. options: further names that the template reads;
        "add_generation_prompt" false ends it behind the last message.

        Raises DataError for an option with a name that the template has already, and when it refuses the messages or
        takes too long.
        """
        taken = [name for name in (*RESERVED, *self._special) if name in (options or {})]
        if taken:
            raise DataError(
                f'chat_template_kwargs: the template has "{taken[0]}" from elsewhere; give "add_generation_prompt" or '
                "names that the template alone reads, such as enable_thinking"
            )
        return self.render(messages, tools, {"add_generation_prompt": True, **(options or {})})

    def close(self) -> None:
        self._process.close()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]
    ) -> str:
        """The template's text. Raises DataError as `text`."""
        formed = [{**message, "content": self._form(message.get("content"))} for message in messages]
        has_calls = any(message.get("tool_calls") for message in messages)
        shape = self._call_shape if has_calls else SHAPES[0]
        history = shaped_history(formed, shape, self._reasoning_key, self.calls)
        if tools and self.calls is not None and self.calls.as_text is not None:
            history = with_tools_of_system(history, tools)
        return self._rendered(history, tools, options)

    def beginning(self, prompt: Sequence[int]) -> AnswerBeginning:
        """What an answer to this prompt may have before its content."""
        is_thinking = self.reasoning is not None and is_open(self._end_of(prompt), self.reasoning)
        return AnswerBeginning(self.reasoning, is_thinking, self._special_id, self.calls)

    def parser(self, prompt: Sequence[int], functions: Sequence[Function] | None = None) -> AnswerParser:
        """Parser of an answer to this prompt. functions: which it may call; None: what looks like a call is content."""
        is_thinking = self.beginning(prompt).is_thinking
        takes_calls = functions is not None
        return AnswerParser(
            self.calls, self.reasoning, functions or (), takes_calls=takes_calls, is_thinking=is_thinking
        )

    def _end_of(self, prompt: Sequence[int]) -> str:
        known = [token for token in prompt[-LONGEST_MARK:] if token < self.tokenizer.vocab_size]
        return self.tokenizer.decode(known)

    def _special_id(self, mark: str) -> int | None:
        ids = self.encode(mark)
        return ids[0] if len(ids) == 1 and self._token_bytes is not None and self._token_bytes[ids[0]] is None else None

    @cached_property
    def _token_bytes(self) -> Sequence[bytes | None] | None:
        return self.tokenizer.token_bytes() if isinstance(self.tokenizer, HasTokenBytes) else None

    @cached_property
    def _reasoning_key(self) -> str | None:
        return reasoning_key(self.source)

    @cached_property
    def _call_shape(self) -> CallShape:
        """The first shape of calls that the template writes."""
        return next((shape for shape in SHAPES if self._writes_calls(shape)), SHAPES[0])

    def _writes_calls(self, shape: CallShape) -> bool:
        try:
            return is_written(self._rendered(probe_messages(shape, self.calls), None, WITHOUT_PROMPT))
        except DataError:
            return False

    def _form(self, content: Content) -> Content:
        """The form that the template takes: parts, or a text in which MARK stands for an image."""
        # Texts stay texts where the template takes both.
        takes_parts = self._takes_parts or (has_image(content) and self._writes_images)
        return as_parts(content) if takes_parts else as_text(content)

    @cached_property
    def _writes_images(self) -> bool:
        """Whether a template that takes texts takes parts too, and writes something for an image among them."""
        text = {"type": "text", "text": PROBE}
        try:
            without, within = (
                self._rendered([{"role": "user", "content": parts}], None, WITHOUT_PROMPT)
                for parts in ([text], [{"type": "image"}, text])
            )
        except DataError:
            return False
        # Templates for texts alone write a list as Python does.
        return PROBE in without and "'type'" not in within and len(within) > len(without)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        # In this order: options cannot replace the special tokens or the messages.
        values = {**options, **self._special, "messages": [*messages], "tools": None if tools is None else [*tools]}
        return self._process.render(values)

    def _find_end(self) -> None:
        """What the template writes after an answer. One that refuses the probe ends with the end of the document."""
        # The first mark behind the answer, such as <|im_end|>: the model was trained to end an answer with it.
        mark = END_MARK.match(self._written().rpartition(PROBE)[2])
        if mark is not None:
            self._add_stop(mark[1])

    def _add_stop(self, mark: str) -> None:
        ids = self.encode(mark)
        # A mark that is one token ends the sequence as a token; one of several tokens is found in the text.
        if len(ids) == 1 and ids[0] not in self.stop_token_ids:
            self.stop_token_ids = (*self.stop_token_ids, ids[0])
        elif len(ids) > 1 and mark not in self.stop:
            self.stop = (*self.stop, mark)

    def _written(self) -> str:
        """The probe as the template writes it; empty if it refuses it. A template that leaves out contents that are
        texts, or refuses them, is tried with parts."""
        # render() reads the attribute, so that the loop's variable is the attribute itself.
        for self._takes_parts in (False, True):
            try:
                written = self.render(CONVERSATION, None, WITHOUT_PROMPT)
            except DataError:
                continue
            if PROBE in written:
                return written
        self._takes_parts = False
        return ""


PLACEHOLDERS = {"image": MARK, "video": MARK, "audio": SOUND_MARK}
"""Types of parts that stand for pictures and sounds, and what stands for them in a text."""


def has_image(content: Content) -> bool:
    return not isinstance(content, str | None) and any(part["type"] in PLACEHOLDERS for part in content)


def as_parts(content: Content) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def as_text(content: Content) -> str:
    """Texts follow one another; an image, a video or a sound is a line of its own, as in LLaVA's training data."""
    if content is None or isinstance(content, str):
        return content or ""
    text, after_image = "", False
    for part in content:
        is_image = part["type"] in PLACEHOLDERS
        if text and (is_image or after_image) and not text.endswith("\n"):
            text += "\n"
        text, after_image = text + (PLACEHOLDERS[part["type"]] if is_image else part["text"]), is_image
    return text


def require_template(name: str | None) -> None:
    """Raises ConfigError for a --chat-template that is neither a name nor a file."""
    if name is not None and name not in NAMES and not Path(name).is_file():
        raise ConfigError(f"--chat-template {name}: neither a file nor one of {', '.join(NAMES)}")


def load_chat_format(
    name: str | None,
    tokenizer: Tokenizer,
    data: Any,
    *,
    seconds: float = 5.0,
    host: PluginHost | None = None,
    tool_call_form: str | None = None,
) -> ChatFormat | None:
    """The format of --chat-template: a built-in name or a Jinja file; else what the model was trained on (data, its
    [data] section), else the tokenizer's own; None if it has none. tool_call_form: in place of the one that the
    template shows. Raises ConfigError for a name that is neither, and for a template that cannot be used."""
    require_template(name)
    if name is not None:
        template = load_chat_template(name, None if name in NAMES else name, tokenizer)
    else:
        trained, file = getattr(data, "chat_template", None), getattr(data, "chat_template_file", None)
        try:
            template = load_chat_template(trained or OF_TOKENIZER, file, tokenizer)
        except NoChatTemplateError:
            return None
        except ConfigError as error:  # a template with an error is not the same as none
            raise ConfigError(
                f"{error}; or choose another with --chat-template {', '.join(NAMES)} or a file"
            ) from error
    return ChatFormat(template, tokenizer, seconds=seconds, host=host, tool_call_form=tool_call_form)
