"""mt's Trainer on the configuration that `mt tune` makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from material import COMPLETION, GROUP, GROUPS, LENGTH, PAIR_ROWS, ROWS, SPECIAL

from mt_core.config.loading import load_config
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.trainer import Trainer

REWARD = """from material import share_of_even

def even(completion_ids, **_):
    return share_of_even(completion_ids)
"""
LORA = {"adapter": {"type": "lora", "rank": 16, "alpha": 32.0}}


class LastLoss(Callback):
    loss = float("nan")

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        self.loss = float(metrics["loss"])


def sections(case: str, folder: Path) -> dict[str, dict[str, Any]]:
    data = {"data_path": [str(folder / "sft.jsonl")], "dataset_type": "sft"}
    train: dict[str, Any] = {"micro_batch_size": ROWS, "global_batch_size": ROWS}
    others: dict[str, dict[str, Any]] = {}
    if case.startswith("dpo"):
        data = {"data_path": [str(folder / "pairs.jsonl")], "dataset_type": "preference", "on_too_long": "drop"}
        train = {"loss": "preference", "batch_source": "reference"}
        train |= {"micro_batch_size": PAIR_ROWS, "global_batch_size": PAIR_ROWS}
        others = {"preference": {"reference": "model" if case == "dpo_model" else "start"}}
    if case == "lora":
        others = LORA
    if case == "grpo":
        return with_rollouts(sections("sft", folder), folder)
    return {
        "checkpoint": {"load": str(folder / "base"), "save_interval": None},
        "data": {**data, "split": "100,0,0", "seq_length": LENGTH},
        "train": {
            "train_iters": 40,
            "eval_interval": None,
            "sample_prompt": "",
            **train,
        },
        "optimizer": {"lr": 1e-5, "clip_grad": 1.0, "weight_decay": 0.0},
        "precision": {"dtype": "fp32"},
        "logging": {"progress": "none"},
        **others,
    }


def with_rollouts(base: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    judges = folder / "judges.py"
    judges.write_text(REWARD)
    batch = {"micro_batch_size": GROUP, "global_batch_size": GROUPS * GROUP}
    policy = {"loss": "policy", "batch_source": "rollouts", "loss_normalization": "sequences"}
    prompts = {"data_path": [str(folder / "prompts.jsonl")], "dataset_type": "prompts", "seq_length": LENGTH}
    return base | {
        "data": base["data"] | prompts,
        "train": base["train"] | batch | policy,
        "rl": {"group_size": GROUP, "max_completion_length": COMPLETION, "write_rollouts": False, "patience": 0},
        "rewards": {"modules": [str(judges)], "functions": ["judges:even"], "workers": 0},
    }


def run(case: str, folder: Path, begin: Callable[[], None], end: Callable[[float, int], None]) -> None:
    seen = LastLoss()
    trainer = Trainer(load_config(sections=sections(case, folder)), callbacks=[seen], run_dir=folder / f"run-{case}")
    trainer.model.train()
    batches = trainer.source.batches()
    batch = next(batches)
    while True:
        begin()
        trainer.take_step(batch)
        tokens = sum(int((arrays["tokens"] >= SPECIAL).sum()) for arrays in batch.micro_batches)
        if case == "grpo":
            # Prompts and completions are no data: samples in place of tokens.
            tokens = GROUPS * GROUP
        # What a source computes with the weights is part of the next step.
        batch = next(batches)
        end(seen.loss, tokens)
