"""Finetuning of BERT with the hyper-parameters of Megatron-LM's examples for MNLI and RACE; QQP has those of MNLI.

The name says task and size: `base` and `345m` are the shapes of the published models, `tiny` one for a CPU. Shape and
tokenizer give way to those of checkpoint.load.
"""

from __future__ import annotations

from typing import Any

from mt_models.bert.presets import PRESETS as BERT

Tree = dict[str, dict[str, Any]]

TINY_MODEL = {**BERT["bert-base-uncased"]["model"], "num_layers": 2, "hidden_size": 128, "num_attention_heads": 2}
SIZES: dict[str, Tree] = {
    "base": BERT["bert-base-uncased"],
    "345m": BERT["megatron-bert-345m-uncased"],
    "tiny": {"model": TINY_MODEL, "data": {"seq_length": 128}},
}


def _recipe(task: str, size: str, *, epochs: int, batch: int, lr: float, warmup: float, **model: Any) -> Tree:
    shape = SIZES[size]
    return {
        "model": {**shape["model"], **model},
        "data": {**shape["data"], "dataset_type": task},
        "train": {
            "train_epochs": epochs,
            "micro_batch_size": batch // 8,  # of the eight GPUs of the examples
            "global_batch_size": batch,
            "eval_interval": None,
            "full_validation": True,
        },
        "optimizer": {"lr": lr, "weight_decay": 0.1, "clip_grad": 1.0},
        "lr_schedule": {"lr_decay_style": "linear", "lr_warmup_fraction": warmup},
        "checkpoint": {"save_interval": None, "keep_last": 1, "best_metric": "accuracy"},
    }


def _pairs(task: str, size: str, classes: int) -> Tree:
    return _recipe(task, size, epochs=5, batch=64, lr=5e-5, warmup=0.065, num_classes=classes)


CLASSIFICATION = {
    f"{task}-bert-{size}": _pairs(task, size, classes) for task, classes in (("mnli", 3), ("qqp", 2)) for size in SIZES
}
MULTIPLE_CHOICE = {
    f"race-bert-{size}": _recipe("race", size, epochs=3, batch=32, lr=1e-5, warmup=0.06) for size in SIZES
}
NONE: dict[str, Tree] = {}
"""Heads on decoders: use presets of the base model, with model.family set to the head's."""
