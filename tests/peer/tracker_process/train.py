"""Run in an environment with the trackers: train.py RUN_DIR TRACKERS SETTING... trains a small model offline."""

from __future__ import annotations

import sys

import torch

from mt_core.config.loading import load_config
from mt_core.train import Trainer

SETTINGS = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "data.seq_length=16",
    "data.num_workers=0",
    "data.corpus_bytes=1000000",
    "train.micro_batch_size=2",
    "train.train_iters=4",
    "train.eval_interval=2",
    "train.eval_iters=1",
    "train.sample_prompt=null",
    "checkpoint.save_interval=null",
    "lr_schedule.lr_warmup_iters=1",
    "logging.progress=none",
    "logging.log_interval=1",
)


def main(run_dir: str, *settings: str) -> None:
    torch.set_num_threads(1)
    for stop in (["train.exit_iteration=2"], []):  # the second goes on where the first stopped
        Trainer(load_config(preset="gpt-tiny", overrides=[*SETTINGS, *settings, *stop]), run_dir=run_dir).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
