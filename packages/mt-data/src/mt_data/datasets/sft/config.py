"""Configuration of supervised fine-tuning, and the files that its checkpoints hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_core.specs import TRAINED_TEMPLATE
from mt_data.datasets.sft.answers import end_ids
from mt_data.datasets.sft.chat_templates import OF_TOKENIZER, load_chat_template
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
    """Conversations in JSON lines, JSON arrays or Parquet; each prefix is a file, or a pattern such as
    "chats/*.jsonl"."""

    dataset_type: str = "sft"
    record_format: Literal["auto", "messages", "prompt-completion", "sharegpt", "alpaca", "text"] = "auto"
    """What records look like; `auto` goes by their keys, and refuses a record that could be of several formats."""
    messages_key: str = "messages"
    """Key of the list of messages, each with role (system, developer, user, assistant, tool) and content."""
    train_on: Literal["answers", "last_answer", "all"] = "answers"
    """Which tokens count in the loss: those of the assistant's answers (of a prompt with a completion, the
    completion's), those of the last one, or all."""
    split_answers: bool = False
    """Each answer is a sample of its own, with the conversation before it written as for generating it: for templates
    that write earlier turns differently from the last one, such as without their reasoning."""
    packing: bool = True
    """Several conversations in a sample, which do not see one another; false puts one in each."""
    on_too_long: Literal["truncate", "error"] = "truncate"
    """A conversation longer than seq_length is cut at its end (and left out when no answer remains), or is
    an error."""

    on_error: Literal["raise", "skip"] = "raise"
    """skip: leave out lines that are no usable conversation, with a warning that counts them and names the first."""

    @model_validator(mode="after")
    def _check_split(self) -> SFTDataConfig:
        if self.split_answers and self.train_on == "all":
            raise ConfigError('data.split_answers=true has no effect with data.train_on="all"; keep one of them')
        return self


# -- files in checkpoints, beside the tokenizer ------------------------------------------------------
#
# The chat template, and which ids end an answer, so that whoever generates with the model writes and ends
# conversations as it was trained.

GENERATION = "generation_config.json"


def checkpoint_files(config: ChatTemplateKeys, tokenizer: Tokenizer, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """`files` with the template of data.chat_template, and generation_config.json with the ids that end an answer.

    Raises ConfigError for a data.chat_template_file that cannot be read or is no Jinja.
    """
    files = {name: data for name, data in files.items() if name != TRAINED_TEMPLATE}
    from_tokenizer = config.chat_template_file is None and config.chat_template == OF_TOKENIZER
    try:
        template = load_chat_template(
            config.chat_template, config.chat_template_file, tokenizer, config.eod_after_answer
        )
    except ConfigError:
        if from_tokenizer:  # the tokenizer brings none along, which the data set reports when it is built
            return files
        raise
    if not from_tokenizer:
        files[TRAINED_TEMPLATE] = template.source.encode()
    if ends := end_ids(template, tokenizer):
        files[GENERATION] = _with_ends(_generation(files, tokenizer), ends)
    return files


def _generation(files: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of generation_config.json; without it, the ids that the tokenizer names."""
    if GENERATION in files:
        try:
            content = json.loads(files[GENERATION])
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{GENERATION} of the checkpoint is no JSON ({error}); correct it") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{GENERATION} of the checkpoint holds no JSON object; correct it")
        return content
    special = tokenizer.special
    ids = {"bos_token_id": special.bos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    return {name: value for name, value in ids.items() if value is not None}


def _with_ends(content: dict[str, Any], ends: list[int]) -> bytes:
    """The trained ends first: programs that take one id take the first."""
    before = content.get("eos_token_id")
    others = before if isinstance(before, list) else [] if before is None else [before]
    ids = list(dict.fromkeys([*ends, *others]))
    # Ids of config.json would replace these, if the mark stayed that says that they are from there.
    kept = {name: value for name, value in content.items() if name != "_from_model_config"}
    return (json.dumps({**kept, "eos_token_id": ids[0] if len(ids) == 1 else ids}, indent=2) + "\n").encode()
