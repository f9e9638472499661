"""Small runs of distillation for tests."""

from __future__ import annotations

import json
from pathlib import Path

from mt_core.config import load_config
from mt_core.config.loading import LoadedConfig

SMALL = (
    *("model.num_layers=2", "model.hidden_size=16", "model.num_attention_heads=4"),
    *("model.max_position_embeddings=32", "model.hidden_dropout=0", "model.attention_dropout=0"),
    *("data.corpus_bytes=1000000", "data.seq_length=16", "train.global_batch_size=4", "train.micro_batch_size=2"),
    *("train.train_iters=3", "train.eval_iters=1", "train.sample_prompt=null", "logging.log_interval=1"),
)
DISTILLED = ("train.loss=distillation", "train.batch_source=teacher")


def config(*overrides: str) -> LoadedConfig:
    """A GPT of two layers on the built-in corpus."""
    return load_config(preset="gpt-tiny", overrides=[*SMALL, *overrides])


def distilled(teacher: str | Path, *overrides: str) -> LoadedConfig:
    return config(*DISTILLED, f"distillation.teacher={json.dumps(str(teacher))}", *overrides)
