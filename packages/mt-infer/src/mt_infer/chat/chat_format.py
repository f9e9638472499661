"""How a model is talked to: its chat template, and the marks that end an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError, DataError
from mt_core.specs import Tokenizer
from mt_data.datasets.sft.builtin_templates import BUILTIN_TEMPLATES
from mt_data.datasets.sft.chat_templates import OF_TOKENIZER, ChatTemplate, load_chat_template
from mt_data.datasets.text_files import bare_encoder
from mt_infer.chat.partners import Message
from mt_infer.chat.template_process import TemplateProcess

END_MARK = re.compile(r"\s*(<[^<>\s]+>)")
"""A mark such as <|im_end|> or </s>."""
PROBE = "answer"


class ChatFormat:
    """Messages to the tokens of a prompt. stop: texts, stop_token_ids: ids, that the template ends an answer with."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, seconds: float = 5.0) -> None:
        self.source = template.source
        self._special = template.special_tokens
        self._process = TemplateProcess(template.source, template.name, seconds=seconds)
        # Templates write BOS themselves.
        self._encode = bare_encoder(tokenizer)
        self.stop: tuple[str, ...] = ()
        self.stop_token_ids: tuple[int, ...] = ()
        self._find_end()

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids up to where the answer begins. options: further names that the template knows.

        Raises DataError when the template refuses the messages, or takes too long.
        """
        return self._encode(self.text(messages, tools, add_generation_prompt=True, **(options or {})))

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, **options: Any) -> str:
        """The rendered template. Raises DataError as `prompt`."""
        values = {**options, **self._special, "messages": list(messages), "tools": None if tools is None else [*tools]}
        return self._process.render(values)

    def close(self) -> None:
        self._process.close()

    def _find_end(self) -> None:
        """What the template writes after an answer. One that refuses the probe ends with the end of the document."""
        conversation = [{"role": "user", "content": "question"}, {"role": "assistant", "content": PROBE}]
        try:
            after = self.text(conversation, None, add_generation_prompt=False).rpartition(PROBE)[2]
        except DataError:
            return
        mark = END_MARK.match(after)
        if mark is None:
            return
        ids = self._encode(mark[1])
        if len(ids) == 1:
            self.stop_token_ids = (ids[0],)
        else:
            self.stop = (mark[1],)


def load_chat_format(name: str | None, tokenizer: Tokenizer, data: Any, *, seconds: float = 5.0) -> ChatFormat | None:
    """The format of --chat-template: a built-in name or a Jinja file; else what the model was trained on (data, its
    [data] section), else the tokenizer's own; None if it has none. Raises ConfigError for a name that is neither."""
    if name is not None:
        is_name = name in (OF_TOKENIZER, *BUILTIN_TEMPLATES)
        if not is_name and not Path(name).is_file():
            raise ConfigError(
                f"--chat-template {name}: neither a file nor one of {', '.join([OF_TOKENIZER, *BUILTIN_TEMPLATES])}"
            )
        template = load_chat_template(name, None if is_name else name, tokenizer)
    else:
        trained, file = getattr(data, "chat_template", None), getattr(data, "chat_template_file", None)
        try:
            template = load_chat_template(trained or OF_TOKENIZER, file, tokenizer)
        except ConfigError:
            return None
    return ChatFormat(template, tokenizer, seconds=seconds)
