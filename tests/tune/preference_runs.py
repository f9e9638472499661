"""Small runs by preferences for tests."""

from __future__ import annotations

import json
from pathlib import Path

from mt_core.config import load_config
from mt_core.config.loading import LoadedConfig

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "no " * (1 + (a + b) % 3)}
    for a in range(4)
    for b in range(4)
]


def write_pairs(folder: Path) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return path


def config(data: Path, *overrides: str) -> LoadedConfig:
    small = ("num_layers=2", "hidden_size=16", "num_attention_heads=4", "max_position_embeddings=64")
    of_gpt = () if any(key.startswith("model.family=") for key in overrides) else ("hidden_dropout=0",)
    keys = [
        *(f"model.{key}" for key in (*small, *of_gpt)),
        "model.attention_dropout=0",
        "data.dataset_type=preference",
        f"data.data_path=[{json.dumps(str(data))}]",
        'data.split="12,4,0"',
        "data.seq_length=64",
        "train.loss=preference",
        "train.batch_source=reference",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "train.train_iters=3",
        "train.eval_iters=1",
        "train.sample_prompt=null",
        "optimizer.lr=0.01",
        "logging.log_interval=1",
    ]
    return load_config(preset="gpt-tiny", overrides=[*keys, *overrides])
