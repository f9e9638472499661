"""The model and the data that both sides of bench/tune.py read: a random Llama of Hugging Face's format with a
tokenizer of numbers, and records whose lengths vary as those of chats do."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB, LAYERS, HIDDEN, HEADS, FFN = 49152, 6, 384, 6, 1024
LENGTH, ROWS = 512, 4
"""Positions of a row, and rows of a step."""
RECORDS = 600
PAIRS, PAIR_ROWS, PAIR_PROMPT, PAIR_ANSWER = 160, 2, 16, 24
"""Records of preferences, rows of a step of them, and mean words of a prompt and of an answer. Short, since logits of
all positions of a padded batch are 100 MB for 512 of them."""
GROUPS, GROUP, COMPLETION = 2, 8, 64
"""Of reinforcement learning: prompts of a step, completions of each, and tokens of a completion."""
SPECIAL = 10
"""Ids below are no words of texts."""


def write(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=2,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2", unk_token="0")
    tokenizer.save_pretrained(folder / "base")
    draw = random.Random(0)
    answers = [{"prompt": text(draw, 40), "completion": " " + text(draw, 60)} for _ in range(RECORDS)]
    pairs = [
        {
            "prompt": text(draw, PAIR_PROMPT),
            "chosen": " " + text(draw, PAIR_ANSWER),
            "rejected": " " + text(draw, PAIR_ANSWER),
        }
        for _ in range(PAIRS)
    ]
    prompts = [{"prompt": text(draw, 40)} for _ in range(RECORDS)]
    for name, records in (("sft", answers), ("pairs", pairs), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def text(draw: random.Random, mean: int) -> str:
    count = min(max(int(draw.lognormvariate(0.0, 0.6) * mean), 4), 3 * mean)
    return " ".join(str(draw.randrange(SPECIAL, VOCAB)) for _ in range(count))


def share_of_even(ids: list[list[int]]) -> list[float]:
    """The reward of completions."""
    return [sum(number % 2 == 0 for number in one) / len(one) for one in ids]
