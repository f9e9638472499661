"""axolotl's configurations."""

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
)
from mt_import.result import ImportResult

FORMATS = {
    "chat_template": "auto",
    "sharegpt": "sharegpt",
    "alpaca": "alpaca",
    "completion": "text",
}
"""Type of a data set -> data.record_format."""
DATASET_IDLE = ("path", "type", "ds_type", "split", "chat_template", "name", "field", "message_property_mappings")
TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "tokenizer_default": "tokenizer"}
TRAIN_ON = {("assistant",): "answers", ("assistant", "gpt"): "answers", ("gpt",): "answers"}


def is_axolotl(values: Mapping[str, Any]) -> bool:
    return "base_model" in values and "merge_method" not in values


def import_axolotl(values: Mapping[str, Any], source: str) -> ImportResult:
    """Raises ConfigError for a file of preferences or rewards."""
    if values.get("rl"):
        raise ConfigError(f"{source}: rl: {values['rl']} is no supervised fine-tuning, which alone is read")
    return import_fields(PROGRAM, values, source)


def _datasets(value: Any, fields: Fields) -> dict[str, Any]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) and "path" in entry for entry in value):
        raise ConfigError("a list of data sets, each with `path`")
    keys = file_names([entry["path"] for entry in value], fields)
    for entry in value:
        keys |= _dataset(entry)
    return keys


def _dataset(entry: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(entry.get("type", "chat_template")).partition(".")[0]
    if (chosen := FORMATS.get(kind)) is None:
        raise ConfigError(f"type {entry.get('type')}; read are {', '.join(FORMATS)}")
    keys: dict[str, Any] = {} if chosen == "auto" else {"data.record_format": chosen}
    for name, value in entry.items():
        if name == "field_messages":
            keys |= {} if value == "messages" else {"data.messages_key": value}
        elif name == "roles_to_train":
            if tuple(value) not in TRAIN_ON:
                raise ConfigError(f"roles_to_train {value}: the assistant's turns alone can be trained, or all tokens")
        elif name == "train_on_eos":
            if value not in ("turn", "all"):
                raise ConfigError(f"train_on_eos {value}: the mark that ends a trained answer is trained always")
        elif name == "message_field_training":
            if value not in ("training", "train", "loss_mask", "loss", "weight"):
                raise ConfigError(f"message_field_training {value}: the key of a message is training, train or weight")
        elif name not in DATASET_IDLE:
            raise ConfigError(f"{name} of a data set")
    return keys


def _template(value: Any, fields: Fields) -> dict[str, Any]:
    if value not in TEMPLATES:
        raise ConfigError(f"a template of axolotl's; use the tokenizer's own, {', '.join(TEMPLATES)}, or a file")
    return {"data.chat_template": TEMPLATES[value]}


def _adapter(value: Any, fields: Fields) -> dict[str, Any]:
    if value != "lora":
        raise ConfigError(f"{value}: the base is in 16 bits; lora is read")
    keys: dict[str, Any] = {"adapter.type": "dora" if fields.get("peft_use_dora") else "lora"}
    if fields.get("lora_target_linear"):
        keys["adapter.targets"] = ["all-linear"]
    return keys


def _held_out(value: Any, fields: Fields) -> dict[str, Any]:
    if not 0 <= float(value) < 1:
        raise ConfigError("a number of samples; give the fraction, or data.split")
    percent = round(100 * float(value), 4)
    return {"data.split": f"{100 - percent:g},{percent:g},0"}


def _on_inputs(value: Any, fields: Fields) -> dict[str, Any]:
    return {"data.train_on": "all"} if value else {}


def _defaults(fields: Fields) -> dict[str, Any]:
    micro = int(fields.get("micro_batch_size") or 1)
    epochs = {} if (fields.get("max_steps") or -1) > 0 else {"train.train_epochs": 1}
    return {
        "data.dataset_type": "sft",
        "data.packing": False,
        "train.micro_batch_size": micro,
        "train.global_batch_size": micro * int(fields.get("gradient_accumulation_steps") or 1),
        "optimizer.weight_decay": 0.0,
        "lr_schedule.lr_decay_style": "cosine",
        **epochs,
    }


def _made() -> dict[str, Any]:
    return {
        **TRAINER_MADE,
        "datasets": _datasets,
        "test_datasets": lambda value, fields: {
            "data.valid_data_path": file_names([entry["path"] for entry in value], fields)["data.data_path"]
        },
        "num_epochs": TRAINER_MADE["num_train_epochs"],
        "optimizer": TRAINER_MADE["optim"],
        "lr_scheduler": TRAINER_MADE["lr_scheduler_type"],
        "gradient_accumulation_steps": accumulation("micro_batch_size", 1),
        "chat_template": _template,
        "chat_template_jinja": lambda value, fields: {"data.chat_template_file": str(value)},
        "adapter": _adapter,
        "lora_alpha": lambda value, fields: {"adapter.alpha": float(value)} if fields.get("adapter") else {},
        "lora_target_modules": lambda value, fields: targets(value, fields) if fields.get("adapter") else {},
        "val_set_size": _held_out,
        "train_on_inputs": _on_inputs,
    }


PROGRAM = Program(
    "axolotl",
    {
        **TRAINER_SAME,
        "base_model": "checkpoint.load",
        "sequence_len": "data.seq_length",
        "sample_packing": "data.packing",
        "micro_batch_size": "train.micro_batch_size",
        "lora_r": "adapter.rank",
        "lora_dropout": "adapter.dropout",
        "peft_use_rslora": "adapter.rslora",
        "embedding_lr": "optimizer.decoupled_lr",
        "noisy_embedding_alpha": "tune.neftune_noise_alpha",
    },
    _made(),
    {
        **TRAINER_IDLE,
        "lora_target_linear": "adapter says it",
        "peft_use_dora": "adapter says it",
        "model_type": "the checkpoint says it",
        "tokenizer_type": "the checkpoint says it",
        "base_model_config": "the checkpoint says it",
        "is_llama_derived_model": "the checkpoint says it",
        "dataset_prepared_path": "what is encoded is kept beside the data, or in data.data_cache_path",
        "pad_to_sequence_len": "samples have one length",
        "eval_sample_packing": "as in training",
        "saves_per_epoch": "checkpoint.save_interval says when; with epochs a run saves at the end of each",
        "evals_per_epoch": "train.eval_interval says when; with epochs a run evaluates at the end of each",
        "wandb_watch": "metrics are recorded, and no gradients",
        "wandb_name": "a run is named as its folder",
        "wandb_project": "wandb.project, with logging.trackers",
        "wandb_entity": "wandb.entity, with logging.trackers",
        "wandb_log_model": "nothing is uploaded",
        "strict": "unknown keys are refused always",
        "early_stopping_patience": "train.early_stop_patience counts evaluations",
        "plugins": "mt's plugins are those that are installed",
        "lora_mlp_kernel": "the section [kernels] chooses implementations",
        "lora_qkv_kernel": "the section [kernels] chooses implementations",
        "lora_o_kernel": "the section [kernels] chooses implementations",
    },
    {
        **TRAINER_REFUSED,
        "special_tokens": "further tokens; add them to the tokenizer and the embeddings before",
        "unfrozen_parameters": "patterns of what is trained; train.frozen_parameters names what is not",
        "lr_groups": "rates by module; tune.lr_multipliers has them by name",
    },
    _defaults,
)
