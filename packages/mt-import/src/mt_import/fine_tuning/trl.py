"""TRL's configurations of `trl sft --config FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.errors import ConfigError
from mt_import.fine_tuning.words import (
    TRAINER_IDLE,
    TRAINER_MADE,
    TRAINER_REFUSED,
    TRAINER_SAME,
    Fields,
    Program,
    accumulation,
    file_names,
    import_fields,
    targets,
    template_file,
)
from mt_import.result import ImportResult

MICRO = "per_device_train_batch_size"


def is_trl(values: Mapping[str, Any]) -> bool:
    return "model_name_or_path" in values and "stage" not in values and "finetuning_type" not in values


def import_trl(values: Mapping[str, Any], source: str) -> ImportResult:
    """Raises ConfigError for a file of another trainer of TRL's."""
    others = [key for key in ("reward_funcs", "reward_model_name_or_path", "num_generations") if key in values]
    if others or isinstance(values.get("beta"), float):
        raise ConfigError(f"{source}: {', '.join(others) or 'beta'} is of another trainer than SFT, which is not read")
    return import_fields(PROGRAM, values, source)


def _completions(value: Any, fields: Fields) -> dict[str, Any]:
    """A loss on completions, or answers, is ours by default; false takes everything."""
    return {} if value else {"data.train_on": "all"}


def _loss(value: Any, fields: Fields) -> dict[str, Any]:
    if value not in ("nll", "dft", "chunked_nll"):
        raise ConfigError("a loss of this name; nll and dft are read")
    return {"train.loss": "dft"} if value == "dft" else {}


def _packing_strategy(value: Any, fields: Fields) -> dict[str, Any]:
    if value not in ("bfd",):
        raise ConfigError("packing that cuts records; best fit decreasing (bfd) keeps each whole")
    return {}


def _adapter(value: Any, fields: Fields) -> dict[str, Any]:
    if not value:
        return {}
    kind = "dora" if fields.get("use_dora") else "lora"
    rank, alpha = int(fields.get("lora_r") or 16), float(fields.get("lora_alpha") or 32)
    return {"adapter.type": kind, "adapter.rank": rank, "adapter.alpha": alpha}


def _of_adapter(key: str) -> Any:
    def translate(value: Any, fields: Fields) -> dict[str, Any]:
        return {key: value} if fields.get("use_peft") else {}

    return translate


def _defaults(fields: Fields) -> dict[str, Any]:
    micro = int(fields.get(MICRO) or 8)
    epochs = {} if (fields.get("max_steps") or -1) > 0 else {"train.train_epochs": 3}
    adapter = {"adapter.dropout": 0.05} if fields.get("use_peft") else {}
    return {
        "data.dataset_type": "sft",
        "data.packing": False,
        "data.seq_length": 1024,
        "train.micro_batch_size": micro,
        "train.global_batch_size": micro * int(fields.get("gradient_accumulation_steps") or 1),
        "optimizer.lr": 2e-5,
        "optimizer.weight_decay": 0.0,
        "lr_schedule.lr_decay_style": "linear",
        **epochs,
        **adapter,
    }


PROGRAM = Program(
    "TRL",
    {
        **TRAINER_SAME,
        "model_name_or_path": "checkpoint.load",
        MICRO: "train.micro_batch_size",
        "max_length": "data.seq_length",
        "max_seq_length": "data.seq_length",
        "packing": "data.packing",
    },
    {
        **TRAINER_MADE,
        "dataset_name": file_names,
        "gradient_accumulation_steps": accumulation(MICRO, 8),
        "completion_only_loss": _completions,
        "assistant_only_loss": _completions,
        "loss_type": _loss,
        "packing_strategy": _packing_strategy,
        "chat_template_path": template_file,
        "use_peft": _adapter,
        "lora_target_modules": lambda value, fields: targets(value, fields) if fields.get("use_peft") else {},
        "lora_dropout": _of_adapter("adapter.dropout"),
        "use_rslora": _of_adapter("adapter.rslora"),
    },
    {
        **TRAINER_IDLE,
        "lora_r": "use_peft says it",
        "lora_alpha": "use_peft says it",
        "use_dora": "use_peft says it",
        "lora_task_type": "adapters are those of causal language models",
        "per_device_eval_batch_size": "evaluations take the micro-batches of training",
        "dataset_text_field": "records of the format text have the key text",
        "padding_free": "packed records never see one another",
        "dataset_train_split": "data.split says it",
        "dataset_test_split": "data.split says it",
        "model_revision": "the folder is what it is",
    },
    TRAINER_REFUSED,
    _defaults,
    ("the chat template is the tokenizer's own unless data.chat_template says another",),
)
