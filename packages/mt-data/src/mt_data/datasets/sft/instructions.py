"""Synthetic instructions about words and small sums, which a small model learns to follow in minutes; needs no file.

Words are drawn, so that none can be memorized: words of validation are in no training sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from mt_core.config.fields import PositiveInt
from mt_core.config.schema import DataConfig
from mt_core.interfaces import Split, SplitRequest, Tokenizer
from mt_data.datasets.sft.answers import ConversationEncoder
from mt_data.datasets.sft.chat_templates import load_chat_template
from mt_data.datasets.sft.conversations import Conversation
from mt_data.datasets.sft.dataset import SFTDataset, padding_id, select
from mt_data.datasets.sft.encoding import Conversations, Gathered
from mt_data.datasets.sft.packing import pack_best_fit
from mt_data.datasets.splits import epoch_order

NAME = "instructions"
HELD_OUT_EVERY = 20
"""One word in so many is for validation, and one for test."""
_CONSONANTS, _VOWELS = "bcdfghklmnprstvw", "aeiou"


class InstructionsDataConfig(DataConfig):
    """Synthetic instructions with answers."""

    dataset_type: str = NAME
    count: PositiveInt = 8000
    """Conversations of the training set; a tenth of it for validation and for test."""
    chat_template: str = "plain"
    """How messages become text: chatml, llama3, plain, or `tokenizer` (the one it brings along)."""
    chat_template_file: str | None = None
    """A Jinja file in place of chat_template."""
    eod_after_answer: bool | None = None
    """Put the end-of-document id after each answer. Default: for the template plain."""


@dataclass(frozen=True)
class Task:
    """An instruction about a word, and its answer."""

    instruction: str
    answer: Callable[[str], str]


TASKS = (
    Task("Repeat {}.", str),
    Task("Write {} twice.", lambda word: f"{word} {word}"),
    Task("Write {} in capital letters.", str.upper),
    Task("What is the first letter of {}?", lambda word: word[0]),
    Task("How many letters has {}?", lambda word: str(len(word))),
)


def instruction_and_answer(rng: random.Random, split: Split) -> tuple[str, str]:
    """One of TASKS with a word of the split."""
    task = rng.choice(TASKS)
    word = next(word for word in _words(rng) if split_of(word) == split)
    return task.instruction.format(word), task.answer(word)


def split_of(word: str) -> Split:
    place = sha256(word.encode()).digest()[0] % HELD_OUT_EVERY
    return {0: "valid", 1: "test"}.get(place, "train")  # type: ignore[return-value]


def _words(rng: random.Random) -> Iterator[str]:
    """Words of 2 to 6 different letters, consonants and vowels in turn."""
    while True:
        length = rng.randint(2, 6)
        letters = [rng.sample(_CONSONANTS, 3), rng.sample(_VOWELS, 3)]
        yield "".join(letters[place % 2][place // 2] for place in range(length))


def build_instructions(config: InstructionsDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> SFTDataset:
    """Packed samples of CAUSAL_LM_SAMPLE. The conversations of a split are the same in every run."""
    template = load_chat_template(config.chat_template, config.chat_template_file, tokenizer, config.eod_after_answer)
    encoder = ConversationEncoder(template, tokenizer)
    rng = random.Random(f"{NAME} {request.split}")
    count = config.count if request.split == "train" else max(config.count // 10, 1)
    gathered = Gathered()
    for number in range(count):
        question, answer = instruction_and_answer(rng, request.split)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        gathered.add(encoder.answers(Conversation([*messages], None, NAME, number + 1)), 0, number + 1)
    arrays = gathered.arrays() | {"skipped": np.zeros((0, 2), np.int64)}
    conversations = Conversations(**arrays, paths=[Path(NAME)])
    selection = select(conversations, range(count), request.sequence_length, "error")
    packing = pack_best_fit(selection.positions, request.sequence_length)
    content: Mapping[str, Any] = {NAME: count, "split": request.split, "tokenizer": tokenizer.fingerprint()}
    return SFTDataset(
        conversations,
        selection,
        packing,
        epoch_order(len(packing), request.num_samples, request.seed),
        sequence_length=request.sequence_length,
        pad=padding_id(tokenizer),
        name=NAME,
        content={**content, "template": template.fingerprint()},
    )
