"""The prompt of the text that a run generates: train.sample_prompt."""

from __future__ import annotations

from collections.abc import Mapping

from mt_core.config.schema import AUTO_PROMPT, Config
from mt_core.errors import MtError
from mt_core.interfaces import Dataset, Tokenizer

BUILTIN_PROMPT = "def "
"""Python carries its own documentation and sources as text."""
OF_TEXT = ("gpt", "fim")
"""Data sets whose samples are pieces of text, without roles and tasks."""
READ_TOKENS = 64
NUM_WORDS = 4
NUM_CHARACTERS = 16


def sample_prompt(config: Config, tokenizer: Tokenizer, texts: Mapping[str, Dataset]) -> str | None:
    """train.sample_prompt, with `auto` resolved; None for no text. texts: validation sets by name."""
    prompt = config.train.sample_prompt
    if prompt != AUTO_PROMPT:
        return prompt or None
    if config.data.dataset_type == "builtin":
        return BUILTIN_PROMPT
    if config.data.dataset_type not in OF_TEXT:
        return None
    dataset = next((dataset for dataset in texts.values() if len(dataset)), None)
    return None if dataset is None else _words_of(dataset, tokenizer)


def _words_of(dataset: Dataset, tokenizer: Tokenizer) -> str | None:
    """A few words of the first sample. It may begin within a word, which is left out, and so does a text without spaces
    begin with its second character."""
    try:
        text = tokenizer.decode([int(token) for token in dataset[0]["tokens"][:READ_TOKENS]])
    except MtError:
        return None
    words = text.split()[1 : 1 + NUM_WORDS]
    return " ".join(words) or text.strip()[1 : 1 + NUM_CHARACTERS].strip() or None
