"""Accelerate's configuration for its Megatron-LM plugin: `accelerate config`'s YAML, and the variables of its launcher.

It says how to share the work; the model, the data and the batch size are in the user's program, so that what comes out
is a part of a configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mt_core.errors import ConfigError, Problems, did_you_mean
from mt_import.megatron_arguments.table import REASONS
from mt_import.megatron_arguments.translation import Account, as_tree
from mt_import.result import ImportResult, Processes

PREFIX = "megatron_lm_"
VARIABLE_PREFIX = "MEGATRON_LM_"
KEYS: Mapping[str, str] = {
    "tp_degree": "parallel.tensor_model_parallel_size",
    "pp_degree": "parallel.pipeline_model_parallel_size",
    "context_parallel_size": "parallel.context_parallel_size",
    "expert_model_parallel_size": "parallel.expert_model_parallel_size",
    "expert_tensor_parallel_size": "parallel.expert_tensor_parallel_size",
    "decoder_last_pipeline_num_layers": "parallel.num_layers_in_last_pipeline_stage",
    "sequence_parallelism": "parallel.sequence_parallel",
    "use_distributed_optimizer": "parallel.use_distributed_optimizer",
    "use_custom_fsdp": "parallel.use_torch_fsdp2",
    "gradient_clipping": "optimizer.clip_grad",
    "recompute_granularity": "recompute.recompute_granularity",
    "recompute_method": "recompute.recompute_method",
    "recompute_num_layers": "recompute.recompute_num_layers",
    "eod_mask_loss": "data.eod_mask_loss",
    "attention_softmax_in_fp32": "precision.attention_softmax_in_fp32",
    "attention_dropout": "model.attention_dropout",
    "hidden_dropout": "model.hidden_dropout",
    "seq_length": "data.seq_length",
    "decoder_seq_length": "data.decoder_seq_length",
    "train_iters": "train.train_iters",
    "train_samples": "train.train_samples",
    "lr_warmup_iters": "lr_schedule.lr_warmup_iters",
    "lr_warmup_samples": "lr_schedule.lr_warmup_samples",
    "lr_warmup_fraction": "lr_schedule.lr_warmup_fraction",
    "lr_decay_style": "lr_schedule.lr_decay_style",
    "lr_decay_iters": "lr_schedule.lr_decay_iters",
    "lr_decay_samples": "lr_schedule.lr_decay_samples",
    "min_lr": "optimizer.min_lr",
    "weight_decay_incr_style": "optimizer.weight_decay_incr_style",
    "start_weight_decay": "optimizer.start_weight_decay",
    "end_weight_decay": "optimizer.end_weight_decay",
    "eval_iters": "train.eval_iters",
    "eval_interval": "train.eval_interval",
}
"""Field of the plugin -> key."""
SELECTIVE = "recompute_activations"
MICRO_BATCHES = "num_micro_batches"
POSITIONS = "use_rotary_position_embeddings"
IDLE: Mapping[str, str] = {
    "no_load_optim": "checkpoint.load takes weights alone, checkpoint.resume_from all of a run",
    "no_save_optim": REASONS["checkpoints"],
    "attention_backend": REASONS["kernels"],
    "calculate_per_token_loss": REASONS["tokens"],
    "use_precision_aware_optimizer": "counts only with a dtype for the moments, optimizer.exp_avg_dtype",
    "overlap_cpu_optimizer_d2h_h2d": "counts only with optimizer_cpu_offload, which is not done",
    "tensorboard_dir": REASONS["records"],
    "set_all_logging_options": REASONS["records"],
    "return_logits": "a program that needs logits calls the model, see docs/guides/python.md",
    "megatron_dataset_flag": "data.dataset_type says what the data is",
}
REFUSED: Mapping[str, str] = {
    "optimizer_cpu_offload": "the optimizer's state in host memory",
    "pipeline_model_parallel_split_rank": "the pipeline rank where the decoder begins; stages are divided over encoder "
    "and decoder together",
    "num_layers_per_virtual_pipeline_stage": "stages by their layers; set "
    "parallel.virtual_pipeline_model_parallel_size to the stages of each rank, and "
    "parallel.pipeline_schedule=interleaved_1f1b",
    "other_megatron_args": "arguments without names of their own; mt import --megatron-args translates a list of them",
}
OWN = (SELECTIVE, MICRO_BATCHES, POSITIONS)
DTYPES: Mapping[str, Mapping[str, str]] = {
    "no": {},
    "fp16": {"precision.dtype": "fp16"},
    "bf16": {"precision.dtype": "bf16"},
    "fp8": {"precision.dtype": "bf16", "precision.fp8_format": "hybrid"},
}
TOP = (
    *("compute_environment", "distributed_type", "mixed_precision", "num_processes", "num_machines", "machine_rank"),
    *("gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "main_training_function"),
    *("use_cpu", "debug", "enable_cpu_affinity", "downcast_bf16", "deepspeed_config", "fsdp_config", "fp8_config"),
    *("parallelism_config", "mpirun_config", "dynamo_config", "megatron_lm_config", "tpu_name", "tpu_zone", "tpu_env"),
    *("tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "fp16", "dynamo_backend"),
)
"""Keys that Accelerate's reader takes."""
SUPPORTED_TYPES = ("MEGATRON_LM", "MULTI_GPU", "NO")
NOTE = (
    "the file has no model, data, batch size or learning rate: add [model], [data] and [train], or give this file's "
    "keys to a configuration that has them"
)


def is_accelerate(values: Mapping[str, Any]) -> bool:
    return "distributed_type" in values or "megatron_lm_config" in values


def keys_with_fields() -> dict[str, list[str]]:
    """Key -> what it is called in the YAML file."""
    special = {SELECTIVE: "recompute.recompute_granularity", POSITIONS: "model.position_embedding_type"}
    fields: dict[str, list[str]] = {"precision.dtype": ["mixed_precision"]}
    for name, key in {**KEYS, **special}.items():
        fields.setdefault(key, []).append(PREFIX + name)
    return fields


def import_accelerate(values: Mapping[str, Any], source: str) -> ImportResult:
    """values: of the YAML file. Raises ConfigError for a key that Accelerate does not know, and another backend."""
    problems = Problems()
    for key in values:
        with problems.collect():
            _require_known(key, TOP)
    kind = str(values.get("distributed_type", "MEGATRON_LM"))
    with problems.collect():
        if kind not in SUPPORTED_TYPES:
            raise ConfigError(
                f"distributed_type={kind} is not read; it can be {', '.join(SUPPORTED_TYPES)}. "
                "docs/guides/parallelism.md has what corresponds to FSDP and DeepSpeed"
            )
    config = values.get("megatron_lm_config") or {}
    fields = {str(key).removeprefix(PREFIX): value for key, value in config.items()}
    for name in fields:
        with problems.collect():
            _require_known(name, [*KEYS, *IDLE, *REFUSED, *OWN], PREFIX)
    problems.stop_if_any()
    return _result(fields, str(values.get("mixed_precision") or "no"), source, _processes(values))


def import_environment(variables: Mapping[str, str]) -> ImportResult:
    """What `accelerate launch` puts into the environment: ACCELERATE_MIXED_PRECISION and MEGATRON_LM_*."""
    names = [*KEYS, *IDLE, *REFUSED, *OWN]
    spelled = {name: VARIABLE_PREFIX + name.upper() for name in names}
    fields = {name: _typed(variables[variable]) for name, variable in spelled.items() if variable in variables}
    processes = Processes(int(variables["WORLD_SIZE"]) if "WORLD_SIZE" in variables else None)
    dtype = variables.get("ACCELERATE_MIXED_PRECISION", "no")
    return _result(fields, dtype, "variables of accelerate launch", processes)


def _require_known(key: str, known: Iterable[str], prefix: str = "") -> None:
    names = list(known)
    if key not in names:
        raise ConfigError(f"{prefix}{key} is no key of Accelerate's{did_you_mean(key, names)}")


def _typed(text: str) -> Any:
    """The text of a variable as YAML would have it."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _processes(values: Mapping[str, Any]) -> Processes:
    total, machines = int(values.get("num_processes") or -1), int(values.get("num_machines") or 1)
    return Processes(
        total // machines if total > 0 else None,
        machines,
        str(values["machine_rank"]) if machines > 1 and values.get("machine_rank") is not None else None,
        values.get("main_process_ip"),
        str(values["main_process_port"]) if values.get("main_process_port") is not None else None,
    )


def _result(fields: Mapping[str, Any], dtype: str, source: str, processes: Processes) -> ImportResult:
    # null: the field was not chosen.
    accounts = [_account(name, value, fields) for name, value in fields.items() if value is not None]
    if dtype.lower() not in DTYPES:
        raise ConfigError(f"mixed_precision={dtype}: it can be {', '.join(DTYPES)}")
    precision = DTYPES[dtype.lower()]
    accounts.append(Account(f"mixed_precision {dtype}", "translated" if precision else "default", precision, ""))
    keys = {key: value for account in accounts for key, value in account.keys.items()}
    return ImportResult(source, as_tree(keys), accounts, {}, processes, _notes(fields), complete=False)


def _account(name: str, value: Any, fields: Mapping[str, Any]) -> Account:
    words = f"{PREFIX}{name} {value}"
    if name == MICRO_BATCHES:
        reason = f"set train.global_batch_size to {value} x train.micro_batch_size x the data-parallel size"
        return Account(words, "no effect", {}, reason)
    if name in REFUSED and value:
        return Account(words, "refused", {}, REFUSED[name])
    if name in IDLE or name in REFUSED:
        return Account(words, "no effect", {}, IDLE.get(name, "it is off"))
    if keys := _keys(name, value, fields):
        return Account(words, "translated", keys, "")
    return Account(words, "no effect", {}, "it is off, or another field says so")


def _keys(name: str, value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    if name == SELECTIVE:  # Accelerate has the field and never forwards it
        chosen = value and not fields.get("recompute_granularity")
        return {"recompute.recompute_granularity": "selective"} if chosen else {}
    if name == POSITIONS:
        return {"model.position_embedding_type": "rope"} if value else {}
    # Accelerate accepts it for one tensor-parallel process too, where it is an error here.
    if name == "sequence_parallelism" and fields.get("tp_degree", 1) == 1:
        return {}
    # Without full recomputation these keys would be ignored, which is an error here.
    if name in ("recompute_method", "recompute_num_layers") and fields.get("recompute_granularity") != "full":
        return {}
    return {KEYS[name]: value}


def _notes(fields: Mapping[str, Any]) -> list[str]:
    notes = [NOTE]
    if fields and "context_parallel_size" not in fields:
        notes.append("Accelerate takes 2 for a context_parallel_size that is not given; here it is 1")
    return notes
