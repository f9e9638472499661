"""TRL's trainers with PEFT. They own their loops: a step begins when a line arrives, and is answered when it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from material import COMPLETION, GROUP, GROUPS, LENGTH, ROWS, SPECIAL, share_of_even
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

PAIRS = 8
"""Pairs of a step: about as many as mt packs into its rows."""


class Served(TrainerCallback):
    def __init__(self, begin: Callable[[], None], end: Callable[[float, int], None]) -> None:
        self.begin, self.end, self.tokens = begin, end, 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.end(float("nan"), self.tokens)


def counted(trainer: Any, served: Served) -> None:
    collate = trainer.data_collator

    def count(examples: Any) -> Any:
        batch = collate(examples)
        served.tokens = int((batch["input_ids"] >= SPECIAL).sum())
        return batch

    trainer.data_collator = count


def run(case: str, folder: Path, begin: Callable[[], None], end: Callable[[float, int], None]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, attn_implementation="sdpa")
    shared: dict[str, Any] = {
        "output_dir": str(folder / f"trl-{case}"),
        "max_steps": 40,
        "learning_rate": 1e-5,
        "max_grad_norm": 1.0,
        "max_length": LENGTH,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    served = Served(begin, end)
    parts: dict[str, Any] = {"model": model, "processing_class": tokenizer, "callbacks": [served]}
    file = {"dpo": "pairs.jsonl", "dpo_model": "pairs.jsonl", "grpo": "prompts.jsonl"}.get(case, "sft.jsonl")
    data = load_dataset("json", data_files=str(folder / file))
    parts["train_dataset"] = data["train"]
    trainer: Any
    if case == "grpo":
        train_grpo(parts, shared, served)
        return
    if case.startswith("dpo"):
        ahead = case == "dpo"
        keys = DPOConfig(per_device_train_batch_size=PAIRS, precompute_ref_log_probs=ahead, **shared)
        trainer = DPOTrainer(args=keys, **parts)
    else:
        lora = {"peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")}
        keys = SFTConfig(per_device_train_batch_size=ROWS, packing=True, **shared)
        trainer = SFTTrainer(args=keys, **parts, **(lora if case == "lora" else {}))
    counted(trainer, served)
    trainer.train()


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return share_of_even(completion_ids)


def train_grpo(parts: dict[str, Any], shared: dict[str, Any], served: Served) -> None:
    """Completions are drawn by transformers with the same weights, in the same process."""
    keys = GRPOConfig(
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=GROUPS,
        num_generations=GROUP,
        max_completion_length=COMPLETION,
        loss_type="grpo",
        **{name: value for name, value in shared.items() if name != "max_length"},
    )
    served.tokens = GROUPS * GROUP
    GRPOTrainer(args=keys, reward_funcs=even, **parts).train()
