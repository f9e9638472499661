"""Configuration of supervised fine-tuning."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from mt_core.errors import ConfigError
from mt_data.datasets.sft.chat_templates import OF_TOKENIZER
from mt_data.datasets.text_files import TextDataConfig


class ChatTemplateKeys(TextDataConfig):
    """How conversations become text."""

    chat_template: str = OF_TOKENIZER
    """How messages become text: `tokenizer` (the one it brings along), chatml, llama3 or plain."""
    chat_template_file: str | None = None
    """A Jinja file in place of chat_template."""
    eod_after_answer: bool | None = None
    """Put the end-of-document id after each answer. Default: for the template plain, whose text has no
    other mark of an answer's end."""

    @model_validator(mode="after")
    def _check_template(self) -> ChatTemplateKeys:
        if self.chat_template_file is not None and self.chat_template != OF_TOKENIZER:
            raise ConfigError(
                f'data.chat_template="{self.chat_template}" and data.chat_template_file={self.chat_template_file} are '
                "both given; keep one of them"
            )
        return self


class SFTDataConfig(ChatTemplateKeys):
    """Conversations in JSON lines; each prefix is a file, or a pattern such as "chats/*.jsonl"."""

    dataset_type: str = "sft"
    messages_key: str = "messages"
    """Key of the list of messages, each with role (system, user, assistant, tool) and content."""
    train_on: Literal["answers", "all"] = "answers"
    """Which tokens count in the loss: those of the assistant's answers, or all."""
    packing: bool = True
    """Several conversations in a sample, which do not see one another; false puts one in each."""
    on_too_long: Literal["truncate", "error"] = "truncate"
    """A conversation longer than seq_length is cut at its end (and left out when no answer remains), or is
    an error."""

    on_error: Literal["raise", "skip"] = "raise"
    """skip: leave out lines that are no usable conversation, with a warning that counts them and names the first."""
