"""Small files of MNLI and RACE whose labels follow from one word of the text."""

from __future__ import annotations

import json
import random
from pathlib import Path

MARKS = {"contradiction": "red", "entailment": "green", "neutral": "blue"}
WORDS = ["dog", "cat", "bird", "sun", "moon", "tree", "rock"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_vocabulary(folder: Path) -> Path:
    path = folder / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, *MARKS.values(), *WORDS]) + "\n")
    return path


def write_mnli(path: Path, count: int, seed: int) -> Path:
    """The label follows from the color in the second sentence."""
    draw = random.Random(seed)
    lines = ["index\tpromptID\tsentence1\tsentence2\tgold_label"]
    for index in range(count):
        label = draw.choice(list(MARKS))
        second = [*draw.choices(WORDS, k=2), MARKS[label]]
        draw.shuffle(second)
        lines.append(f"{index}\t-\t{' '.join(draw.choices(WORDS, k=3))}\t{' '.join(second)}\t{label}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_race(folder: Path, count: int, seed: int) -> Path:
    """The right option is the one that is red."""
    draw = random.Random(seed)
    folder.mkdir()
    for index in range(count):
        right = draw.randrange(4)
        options = [f"{'red' if n == right else draw.choice(['green', 'blue'])} {draw.choice(WORDS)}" for n in range(4)]
        article = {"article": draw.choice(WORDS), "questions": ["the _ ."], "options": [options]}
        (folder / f"{index}.txt").write_text(json.dumps({**article, "answers": ["ABCD"[right]]}))
    return folder


SMALL = [
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.max_position_embeddings=16",
    "model.hidden_dropout=0.0",
    "model.attention_dropout=0.0",
    "model.vocab_size=null",
    "tokenizer.tokenizer_type=BertWordPieceLowerCase",
    "data.seq_length=16",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
    "train.train_epochs=5",
    "train.num_threads=1",
    "optimizer.lr=3e-3",
    "model.init_method_std=0.1",
    "logging.progress=none",
]


def mnli_settings(folder: Path) -> list[str]:
    """Writes 240 training samples, 50 and 31 of two development sets."""
    train, matched, mismatched = (
        write_mnli(folder / f"{name}.tsv", count, seed)
        for seed, (name, count) in enumerate((("train", 240), ("matched", 50), ("mismatched", 31)))
    )
    return [
        *SMALL,
        f"tokenizer.vocab_file={write_vocabulary(folder)}",
        f'data.train_data_path=["{train}"]',
        f'data.valid_data_paths={{matched=["{matched}"], mismatched=["{mismatched}"]}}',
    ]
