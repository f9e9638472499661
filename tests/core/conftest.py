"""Small runs that take a second or two."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.plugins import PluginHost, load_plugins

TINY = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "data.seq_length=16",
    "data.num_workers=0",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.train_iters=6",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "train.sample_prompt=null",
    "train.num_threads=1",
    "checkpoint.save_interval=null",
    "lr_schedule.lr_warmup_iters=1",
    "logging.log_interval=1",
    "logging.progress=none",
]
LITTLE_TEXT = "data.corpus_bytes=100000"
"""All of the built-in corpus takes as long as the steps of a small run."""


@pytest.fixture(scope="session")
def host() -> PluginHost:
    return load_plugins()


@pytest.fixture(scope="session")
def tiny(host):
    """A function from overrides to the loaded configuration of a very small GPT; LITTLE_TEXT unless they set data."""

    def load(*overrides: str) -> LoadedConfig:
        torch.set_num_threads(1)
        corpus = [] if any(each.startswith("data.dataset_type=") for each in overrides) else [LITTLE_TEXT]
        return load_config(preset="gpt-tiny", overrides=[*TINY, *corpus, *overrides], host=host)

    return load
