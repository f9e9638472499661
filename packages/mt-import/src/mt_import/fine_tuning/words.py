"""What the programs have in common: names of Transformers' trainer and PEFT, and how a field becomes an account."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError
from mt_import.megatron_arguments.translation import Account, as_tree
from mt_import.result import ImportResult, Processes

Fields = Mapping[str, Any]
Translate = Callable[[Any, Fields], Mapping[str, Any]]
"""(value, all fields) -> keys and values of ours. Raises ConfigError for a value that cannot be."""
DATA_FILES = (".json", ".jsonl", ".parquet", ".gz", ".zst")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
}
"""lr_scheduler_type -> lr_decay_style."""
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused")


@dataclass(frozen=True)
class Program:
    """A program whose files are read.

    same: field -> key of the same value. made: field -> its keys. idle: field -> why it changes nothing. refused: field
    -> what it asks for. defaults: keys and values of fields that a file may leave out, where ours differ.
    """

    name: str
    same: Mapping[str, str]
    translated: Mapping[str, Translate]
    idle: Mapping[str, str]
    refused: Mapping[str, str]
    defaults: Callable[[Fields], Mapping[str, Any]]
    notes: tuple[str, ...] = field(default=())


def import_fields(program: Program, fields: Fields, source: str) -> ImportResult:
    """Each field is translated, or refused by its name."""
    accounts = [_account(program, name, value, fields) for name, value in fields.items() if value is not None]
    keys = {key: value for account in accounts for key, value in account.keys.items()}
    written = {key: value for key, value in program.defaults(fields).items() if key not in keys}
    # Sections of a part: the model comes from the checkpoint, and the data may be added.
    return ImportResult(
        f"{source}, a file of {program.name}",
        as_tree({**written, **keys}),
        accounts,
        written,
        Processes(),
        [*program.notes, *_notes(fields)],
        complete=False,
    )


def _account(program: Program, name: str, value: Any, fields: Fields) -> Account:
    words = f"{name} {value}"
    if name in program.same:
        return Account(words, "translated", {program.same[name]: value}, "")
    if name in program.translated:
        try:
            keys = program.translated[name](value, fields)
        except ConfigError as error:
            return Account(words, "refused", {}, str(error))
        return Account(words, "translated", dict(keys), "") if keys else Account(words, "no effect", {}, "it is off")
    if name in program.idle or value is False:
        return Account(words, "no effect", {}, program.idle.get(name, "it is off"))
    unknown = f"no key of mt stands for this field of {program.name}"
    return Account(words, "refused", {}, program.refused.get(name, unknown))


def _notes(fields: Fields) -> list[str]:
    out = fields.get("output_dir")
    return [f"output_dir: mt train FILE --run-dir {out}"] if out else []


# -- fields of Transformers' trainer and PEFT ----------------------------------------------------------


def file_names(value: Any, fields: Fields) -> dict[str, Any]:
    """A data set by its file. Raises ConfigError for one of a hub."""
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not str(name).endswith(DATA_FILES) and not Path(str(name)).exists():
            raise ConfigError(f"{name} is a data set of a hub; download it, and name its files with data.data_path")
    return {"data.data_path": [str(name) for name in names]}


def epochs(value: Any, fields: Fields) -> dict[str, Any]:
    """Whole epochs, unless the number of steps is given."""
    if (fields.get("max_steps") or -1) > 0:
        return {}
    if float(value) != int(float(value)):
        raise ConfigError("parts of an epoch: give train.train_iters, or a whole number")
    return {"train.train_epochs": int(float(value))}


def steps(value: Any, fields: Fields) -> dict[str, Any]:
    return {"train.train_iters": int(value)} if int(value) > 0 else {}


def accumulation(micro: str, default: int) -> Translate:
    """micro: the field with the micro-batch size."""

    def translate(value: Any, fields: Fields) -> dict[str, Any]:
        return {"train.global_batch_size": int(value) * int(fields.get(micro) or default)}

    return translate


def schedule(value: Any, fields: Fields) -> dict[str, Any]:
    if value not in SCHEDULES:
        raise ConfigError(f"a schedule of this name; there are {', '.join(SCHEDULES)}")
    return {"lr_schedule.lr_decay_style": SCHEDULES[value]}


def warmup(key: str) -> Translate:
    def translate(value: Any, fields: Fields) -> dict[str, Any]:
        # A number below 1 is a fraction, in Transformers 5 also of warmup_steps.
        if 0 < float(value) < 1:
            return {"lr_schedule.lr_warmup_fraction": float(value)}
        return {key: int(value)} if value else {}

    return translate


def adamw(value: Any, fields: Fields) -> dict[str, Any]:
    if value not in ADAMW:
        raise ConfigError(f"an optimizer of this name; AdamW is read: {', '.join(ADAMW)}")
    return {"optimizer.optimizer": "adam"}


def dtype(name: str) -> Translate:
    def translate(value: Any, fields: Fields) -> dict[str, Any]:
        # "auto": where the device has it.
        return {"precision.dtype": name} if value in (True, "auto", "true") else {}

    return translate


def recomputation(value: Any, fields: Fields) -> dict[str, Any]:
    return {"recompute.recompute_granularity": "full"} if value else {}


def targets(value: Any, fields: Fields) -> dict[str, Any]:
    """Layers that an adapter is put on."""
    names = value if isinstance(value, list) else str(value).split(",")
    everything = {"all", "all-linear"}
    return {"adapter.targets": ["all-linear"] if everything & set(names) else [name.strip() for name in names]}


def trackers(value: Any, fields: Fields) -> dict[str, Any]:
    names = value if isinstance(value, list) else [value]
    return {"logging.trackers": names} if names and names != ["none"] and names != ["all"] else {}


def template_file(value: Any, fields: Fields) -> dict[str, Any]:
    return {"data.chat_template_file": str(value)}


TRAINER_SAME = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.adam_beta1",
    "adam_beta2": "optimizer.adam_beta2",
    "adam_epsilon": "optimizer.adam_eps",
    "max_grad_norm": "optimizer.clip_grad",
    "seed": "train.seed",
    "save_steps": "checkpoint.save_interval",
    "eval_steps": "train.eval_interval",
    "logging_steps": "logging.log_interval",
    "save_total_limit": "checkpoint.keep_last",
    "neftune_noise_alpha": "tune.neftune_noise_alpha",
}
"""Fields of Transformers' trainer -> key of the same value."""
TRAINER_MADE: dict[str, Translate] = {
    "num_train_epochs": epochs,
    "max_steps": steps,
    "lr_scheduler_type": schedule,
    "warmup_ratio": warmup("lr_schedule.lr_warmup_iters"),
    "warmup_steps": warmup("lr_schedule.lr_warmup_iters"),
    "optim": adamw,
    "bf16": dtype("bf16"),
    "fp16": dtype("fp16"),
    "gradient_checkpointing": recomputation,
    "report_to": trackers,
}
TRAINER_IDLE = {
    "output_dir": "a run's folder is that of --run-dir",
    "logging_dir": "metrics are in the run's folder",
    "logging_strategy": "metrics are written each logging.log_interval steps",
    "logging_first_step": "the first step is logged always",
    "run_name": "a run is named as its folder",
    "eval_strategy": "train.eval_interval says when",
    "evaluation_strategy": "train.eval_interval says when",
    "save_strategy": "checkpoint.save_interval says when",
    "save_safetensors": "weights are in safetensors",
    "save_only_model": "checkpoints have all that a run needs to go on",
    "dataloader_num_workers": "threads read samples ahead: data.num_workers",
    "dataloader_pin_memory": "batches are copied ahead of their step",
    "dataset_num_proc": "records are encoded once and kept",
    "preprocessing_num_workers": "records are encoded once and kept",
    "overwrite_cache": "what is kept is found by its content",
    "overwrite_output_dir": "a run that exists goes on, or another --run-dir is chosen",
    "do_train": "it trains",
    "do_eval": "train.eval_interval says when",
    "remove_unused_columns": "records keep what is needed",
    "group_by_length": "packing fills samples",
    "trust_remote_code": "no code of a model's folder is executed",
    "attn_implementation": "model.attention_backend is chosen by what the device has",
    "flash_attn": "model.attention_backend is chosen by what the device has",
    "flash_attention": "model.attention_backend is chosen by what the device has",
    "sdp_attention": "model.attention_backend is chosen by what the device has",
    "xformers_attention": "model.attention_backend is chosen by what the device has",
    "gradient_checkpointing_kwargs": "recomputation has one implementation",
    "tf32": "products in fp32 are torch's",
    "ddp_timeout": "the section [timeouts] has its own",
    "ddp_find_unused_parameters": "every parameter is found",
    "use_liger_kernel": "the section [kernels] chooses implementations by what the device has",
    "torch_dtype": "precision.dtype says it",
    "model_init_kwargs": "precision.dtype and model.attention_backend say it",
    "dtype": "precision.dtype says it",
    "eos_token": "the tokenizer's, with the mark of the template",
    "pad_token": "padding is left out by place",
    "hub_model_id": "nothing is uploaded",
}
TRAINER_REFUSED = {
    "load_in_4bit": "a quantized base; see adapter and mt convert --saver for what there is",
    "load_in_8bit": "a quantized base; see adapter and mt convert --saver for what there is",
    "deepspeed": "DeepSpeed; docs/guides/parallelism.md has what corresponds to it",
    "fsdp": "FSDP by Transformers; set parallel.use_torch_fsdp2=true",
    "fsdp_config": "FSDP by Transformers; set parallel.use_torch_fsdp2=true",
    "push_to_hub": "uploads; mt convert --saver hf writes the folder",
    "resume_from_checkpoint": "a checkpoint of another program; a run of mt goes on by itself",
    "label_smoothing_factor": "smoothed labels",
    "max_samples": "a part of the data; write a smaller file",
}
