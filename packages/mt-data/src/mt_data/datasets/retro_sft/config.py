"""Configuration of instruction tuning with passages."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, model_validator

from mt_core.errors import ConfigError
from mt_data.datasets.retro.config import NeighborKeys
from mt_data.datasets.sft.chat_templates import OF_TOKENIZER
from mt_data.datasets.text_files import TextDataConfig


class RetroSFTDataConfig(NeighborKeys, TextDataConfig):
    """Questions with answers and passages in JSON lines, or in JSON arrays as Megatron's `NAME_QA_train.json`."""

    dataset_type: str = "retro_sft"
    ft_neighbours: NonNegativeInt = 1
    """Passages in the prompt, before the question."""
    encode_passages: bool = True
    """Passages are neighbours of every chunk too, which the encoder reads; false: no chunk has neighbours."""
    reuse_top: bool = True
    """The neighbours are the first passages; false: those behind the ft_neighbours passages of the prompt."""
    chat_template: str = OF_TOKENIZER
    """How question and answer become text: `tokenizer` (the one it brings along), chatml, llama3 or plain."""
    chat_template_file: str | None = None
    """A Jinja file in place of chat_template."""
    eod_after_answer: bool | None = None
    """Put the end-of-document id after each answer. Default: for the template plain, whose text has no
    other mark of an answer's end."""
    on_too_long: Literal["truncate", "error"] = "truncate"
    """Where a question and its answer do not fit into seq_length without any passage in the prompt, the answer is cut
    at its end (and the record left out when nothing of it remains), or it is an error."""
    on_error: Literal["raise", "skip"] = "raise"
    """skip: leave out records that cannot be used, with a warning that counts them and names the first."""

    @model_validator(mode="after")
    def _check_template(self) -> RetroSFTDataConfig:
        if self.chat_template_file is not None and self.chat_template != OF_TOKENIZER:
            raise ConfigError(
                f'data.chat_template="{self.chat_template}" and data.chat_template_file={self.chat_template_file} are '
                "both given; keep one of them"
            )
        return self

    @property
    def neighbor_passages(self) -> slice:
        """Which passages of a record are neighbours."""
        first = 0 if self.reuse_top else self.ft_neighbours
        return slice(first, first + self.retro_num_neighbors if self.encode_passages else first)
