"""A file of short conversations of unequal lengths, and the configurations that train on it."""

from __future__ import annotations

import json
import random
from pathlib import Path

SETTINGS = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "data.dataset_type=sft",
    "data.chat_template=plain",
    "data.seq_length=64",
    "data.split='1'",
    "train.train_iters=5",
    "train.eval_interval=null",
    "train.eval_iters=0",
    "train.sample_prompt=null",
    "checkpoint.save_interval=null",
    "lr_schedule.lr_warmup_iters=1",
    "logging.progress=none",
)


def write_chats(path: Path, count: int = 96) -> Path:
    rng = random.Random(1)
    with path.open("w") as file:
        for number in range(count):
            question, answer = f"{number}" + "q" * rng.randint(0, 6), "a" * rng.randint(1, 20)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def settings(path: Path, *more: str) -> list[str]:
    cache = f'data.data_cache_path="{path.parent / "cache"}"'
    return [*SETTINGS, f'data.data_path=["{path}"]', cache, *more]
