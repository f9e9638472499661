"""The prompt of the text that a run generates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mt_core.errors import DataError
from mt_core.train.sample_prompt import sample_prompt

CHARACTERS: Any = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))


def prompt_of(text: str, kind: str = "gpt", prompt: str | None = "auto") -> str | None:
    config: Any = SimpleNamespace(train=SimpleNamespace(sample_prompt=prompt), data=SimpleNamespace(dataset_type=kind))
    return sample_prompt(config, CHARACTERS, {"empty": [], "valid": [{"tokens": [ord(letter) for letter in text]}]})


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("rowed town lay silent\nunder the snow", "town lay silent under"),
        ("学而时习之不亦说乎有朋自远方来不亦乐乎", "而时习之不亦说乎有朋自远方来不亦"),
        ("x", None),
        ("", None),
    ],
)
def test_auto_is_of_the_validation_text(text: str, prompt: str | None) -> None:
    """Without the first word, or character of a text without spaces, which may be cut."""
    assert prompt_of(text) == prompt


def test_of_other_data_and_other_prompts() -> None:
    assert prompt_of("a few words more", "builtin") == "def "
    assert prompt_of("a few words more", "sft") is None
    assert prompt_of("a few words more", prompt="once") == "once"
    assert prompt_of("a few words more", prompt="") is None


def test_a_tokenizer_that_decodes_nothing_gives_none() -> None:
    def refuse(ids: object) -> str:
        raise DataError("no text")

    config: Any = SimpleNamespace(train=SimpleNamespace(sample_prompt="auto"), data=SimpleNamespace(dataset_type="gpt"))
    tokenizer: Any = SimpleNamespace(decode=refuse)
    assert sample_prompt(config, tokenizer, {"valid": [{"tokens": [1]}]}) is None
