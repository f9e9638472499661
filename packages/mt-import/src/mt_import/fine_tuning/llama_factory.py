"""LLaMA-Factory's configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_core.config.files import read_values
from mt_core.errors import ConfigError, did_you_mean
from mt_import.fine_tuning.words import (
    TRAINER_IDLE,
    TRAINER_MADE,
    TRAINER_REFUSED,
    TRAINER_SAME,
    Fields,
    Program,
    accumulation,
    import_fields,
    targets,
)
from mt_import.result import ImportResult

MICRO, INFO = "per_device_train_batch_size", "dataset_info.json"


def is_llama_factory(values: Mapping[str, Any]) -> bool:
    return "stage" in values or "finetuning_type" in values


def import_llama_factory(values: Mapping[str, Any], source: str) -> ImportResult:
    """Raises ConfigError for another stage than sft."""
    if (stage := values.get("stage", "sft")) != "sft":
        raise ConfigError(f"{source}: stage {stage} is no supervised fine-tuning, which alone is read")
    return import_fields(PROGRAM, values, source)


def _datasets(value: Any, fields: Fields) -> dict[str, Any]:
    """The files that dataset_info.json names, or files themselves."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
    folder = Path(str(fields.get("dataset_dir") or "data"))
    info = read_values(folder / INFO) if (folder / INFO).is_file() else {}
    return {"data.data_path": [_file(name, folder, info) for name in names]}


def _file(name: str, folder: Path, info: Mapping[str, Any]) -> str:
    if name not in info:
        near = did_you_mean(name, info)
        raise ConfigError(f"{name} is not in {folder / INFO}{near}; name its file with data.data_path")
    entry = info[name]
    if "file_name" not in entry:
        raise ConfigError(f"{name} is a data set of a hub; download it, and name its files with data.data_path")
    if entry.get("ranking"):
        raise ConfigError(f"{name} has pairs of answers, which are no supervised fine-tuning")
    renamed = {key: column for key, column in (entry.get("columns") or {}).items() if key not in ("messages", "tools")}
    usual = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
    if other := {key: column for key, column in renamed.items() if usual.get(key) != column}:
        raise ConfigError(f"{name} has columns of other names ({', '.join(other.values())}); rename them in the file")
    return str(folder / entry["file_name"])


def _adapter(value: Any, fields: Fields) -> dict[str, Any]:
    if value == "full":
        return {}
    if value != "lora":
        raise ConfigError(f"{value}: full and lora are read; train.frozen_parameters freezes by name")
    rank = int(fields.get("lora_rank") or 8)
    return {
        "adapter.type": "dora" if fields.get("use_dora") else "lora",
        "adapter.rank": rank,
        "adapter.alpha": float(fields.get("lora_alpha") or 2 * rank),
        "adapter.dropout": float(fields.get("lora_dropout") or 0.0),
        **targets(fields.get("lora_target") or "all", fields),
    }


def _held_out(value: Any, fields: Fields) -> dict[str, Any]:
    if not 0 <= float(value) < 1:
        raise ConfigError("a number of samples; give the fraction, or data.split")
    percent = round(100 * float(value), 4)
    return {"data.split": f"{100 - percent:g},{percent:g},0"}


def _defaults(fields: Fields) -> dict[str, Any]:
    micro = int(fields.get(MICRO) or 8)
    epochs = {} if (fields.get("max_steps") or -1) > 0 else {"train.train_epochs": 3}
    return {
        "data.dataset_type": "sft",
        "data.packing": False,
        "data.seq_length": 2048,
        "train.micro_batch_size": micro,
        "train.global_batch_size": micro * int(fields.get("gradient_accumulation_steps") or 1),
        "optimizer.lr": 5e-5,
        "optimizer.weight_decay": 0.0,
        "lr_schedule.lr_decay_style": "linear",
        **({} if "finetuning_type" in fields else _adapter("lora", fields)),
        **epochs,
    }


def _made() -> dict[str, Any]:
    return {
        **TRAINER_MADE,
        "dataset": _datasets,
        "gradient_accumulation_steps": accumulation(MICRO, 8),
        "finetuning_type": _adapter,
        "val_size": _held_out,
        "train_on_prompt": lambda value, fields: {"data.train_on": "all"} if value else {},
        "mask_history": lambda value, fields: {"data.train_on": "last_answer"} if value else {},
        "neat_packing": lambda value, fields: {"data.packing": True} if value else {},
        "use_dft_loss": lambda value, fields: {"train.loss": "dft"} if value else {},
        "use_rslora": lambda value, fields: {"adapter.rslora": True} if value else {},
    }


PROGRAM = Program(
    "LLaMA-Factory",
    {
        **TRAINER_SAME,
        "model_name_or_path": "checkpoint.load",
        MICRO: "train.micro_batch_size",
        "cutoff_len": "data.seq_length",
        "packing": "data.packing",
    },
    _made(),
    {
        **TRAINER_IDLE,
        "stage": "supervised fine-tuning",
        "dataset_dir": "dataset says the files",
        "lora_rank": "finetuning_type says it",
        "lora_alpha": "finetuning_type says it",
        "lora_dropout": "finetuning_type says it",
        "lora_target": "finetuning_type says it",
        "use_dora": "finetuning_type says it",
        "template": "the tokenizer's own template; data.chat_template and data.chat_template_file choose another",
        "plot_loss": "docs/guides/logging.md has the curves",
        "per_device_eval_batch_size": "evaluations take the micro-batches of training",
        "enable_thinking": "reasoning_content of a message is written by the template",
        "default_system": "a system message of a record",
    },
    TRAINER_REFUSED,
    _defaults,
)
