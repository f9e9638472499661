"""Configurations of torchtitan up to 0.2: TOML files that name a model by its flavor and say how to train it.

Since 0.3 torchtitan's configurations are Python functions, which are not read. Facts of torchtitan 0.2.0
(`config/job_config.py`, `components/lr_scheduler.py`, `components/optimizer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mt_core.errors import ConfigError, did_you_mean
from mt_core.plugins import PluginHost
from mt_import.megatron_arguments.translation import Account, as_tree
from mt_import.readers.torchtitan_models import WITHIN_DOCUMENTS, family_of, model_section, note_on_model
from mt_import.result import ImportResult, Processes

Values = Mapping[str, Mapping[str, Any]]
Keys = dict[str, Any]
SECTIONS = ("job", "model", "training", "optimizer", "lr_scheduler", "parallelism")
"""Sections of which a file has at least three."""
SCHEDULES: Mapping[str, str] = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "ZBVZeroBubble": "zbv_zero_bubble",
    "DualPipeV": "dualpipe_v",
}
SINGLE_STAGE = ("1F1B", "GPipe")
"""Schedules with one stage on a rank; the others have two unless layers of a stage are given."""
TAILS: Mapping[str, str] = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}
DEFAULTS: Mapping[str, Any] = {
    "optimizer.name": "AdamW",
    "optimizer.lr": 8e-4,
    "optimizer.eps": 1e-8,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 200,
    "lr_scheduler.decay_ratio": None,
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.0,
    "training.local_batch_size": 8,
    "training.global_batch_size": -1,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.steps": 10000,
    "training.mixed_precision_param": "bfloat16",
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "parallelism.fsdp_reshard_after_forward": "default",
    "checkpoint.interval": 500,
    "checkpoint.keep_latest_k": 10,
    "activation_checkpoint.mode": "selective",
    "metrics.log_freq": 10,
}
"""torchtitan's defaults of the keys that are read."""
IDLE: Mapping[str, str] = {
    "job": "says where torchtitan writes; --run-dir says it here",
    "profiling": "mt train has a profiler of its own, see docs/guides/logging.md",
    "comm": "docs/guides/launching.md says how faults and time limits are handled",
    "fault_tolerance": "docs/guides/launching.md says how faults are handled",
    "memory_estimation": "mt plan reports memory",
    "metrics": "metrics.jsonl and log.txt in the run directory are the records",
    "checkpoint": "checkpoints are written in the format of mt; mt convert writes others",
    "compile": "counts only with compile.enable",
    "activation_checkpoint": "which values are kept and which are computed again changes no result",
    "optimizer": "another implementation of the same update",
    "training": "how memory is reused and samples are read changes no result",
    "parallelism": "another implementation of the same computation",
    "model": "counts for torchtitan's own files",
    "experimental": "no key of a run",
    "validation": "train.eval_interval and train.eval_iters say when a run evaluates",
    "float8": "counts only with model.converters",
    "mx": "counts only with model.converters",
    "quantize": "counts only with model.converters",
    "debug": "how determinism is checked changes no result",
    "dataset": "data are named by data.data_path here",
}
"""Section -> why keys that are not read by themselves have no effect."""
REFUSED: Mapping[str, str] = {
    "training.enable_cpu_offload": "parameters and optimizer state in host memory",
    "optimizer.early_step_in_backward": "updates within the backward pass, without clipping",
    "parallelism.pipeline_parallel_schedule_csv": "a schedule from a file",
    "experimental.custom_import": "code of your own; write a plugin",
    "debug.moe_force_load_balance": "routing that ignores the router",
    "training.debug_moe_force_load_balance": "routing that ignores the router",
    "job.custom_config_module": "code of your own; write a plugin",
}
NOTE_DATA = (
    'data and tokenizer are named by torchtitan\'s data sets: add [data] dataset_type = "gpt" with data_path, and '
    "[tokenizer]; without them the text that Python carries is trained on"
)
NOTE_DECAY = "torchtitan decays norms, too; here optimizer.weight_decay is that of matrices alone"


@dataclass(frozen=True)
class Settings:
    """The keys of a file, dotted, and torchtitan's defaults behind them."""

    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.values.get(key, DEFAULTS.get(key))


def is_torchtitan(values: Mapping[str, Any]) -> bool:
    model = values.get("model")
    named = isinstance(model, Mapping) and "flavor" in model
    return named and sum(section in values for section in SECTIONS) >= 3


def import_torchtitan(values: Values, source: str, host: PluginHost) -> ImportResult:
    """Raises ConfigError for a model or flavor that no preset is, and values that cannot be read."""
    flat = {f"{section}.{key}": value for section, keys in values.items() for key, value in _items(section, keys)}
    renamed = {new: flat[old] for old, new in OLD_NAMES.items() if old in flat}
    settings = Settings({**renamed, **flat})
    decided: dict[str, Keys] = {}
    for name, rule in RULES.items():
        decided[name] = rule(settings)
    tree = as_tree({key: value for keys in decided.values() for key, value in keys.items()})
    tree["model"] = {**model_section(*_chosen(settings), host), **tree.get("model", {})}
    if _chosen(settings) in WITHIN_DOCUMENTS:
        tree["data"] = {**tree.get("data", {}), "reset_attention_mask": True}
    accounts = [_account(key, value, decided, settings) for key, value in flat.items()]
    named = {key for account in accounts for key in account.keys}
    written = {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}
    written = {key: value for key, value in written.items() if key not in named and not key.startswith("model.")}
    return ImportResult(
        source,
        tree,
        accounts,
        written,
        Processes(None),
        [note_on_model(*_chosen(settings)), NOTE_DATA, NOTE_DECAY, *_notes(settings)],
        complete=False,
    )


def _items(section: str, keys: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(keys, Mapping):
        raise ConfigError(f"{section}: got a {type(keys).__name__}, expected a section of torchtitan")
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", entry) for inner, entry in _items(f"{section}.{key}", value))
        else:
            yield str(key), value


OLD_NAMES: Mapping[str, str] = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
}
"""Keys of other versions -> the ones that are read."""


def _optimizer(settings: Settings) -> Keys:
    if settings["optimizer.name"] not in ("AdamW", "Adam"):
        raise ConfigError(f"optimizer.name={settings['optimizer.name']} is not read; it can be AdamW")
    lr = float(settings["optimizer.lr"])
    return {
        "optimizer.optimizer": "adam",
        "optimizer.lr": lr,
        "optimizer.adam_eps": float(settings["optimizer.eps"]),
        "optimizer.adam_beta1": float(settings["optimizer.beta1"]),
        "optimizer.adam_beta2": float(settings["optimizer.beta2"]),
        "optimizer.weight_decay": float(settings["optimizer.weight_decay"]),
        "optimizer.clip_grad": float(settings["training.max_norm"]),
        "optimizer.min_lr": lr * float(settings["lr_scheduler.min_lr_factor"]),
    }


def _schedule(settings: Settings) -> Keys:
    steps, kind = int(settings["training.steps"]), str(settings["lr_scheduler.decay_type"])
    warmup, ratio = min(int(settings["lr_scheduler.warmup_steps"]), steps), settings["lr_scheduler.decay_ratio"]
    if kind not in TAILS:
        raise ConfigError(f"lr_scheduler.decay_type={kind} is not read; it can be {', '.join(TAILS)}")
    keys: Keys = {"lr_schedule.lr_warmup_iters": warmup}
    if ratio is None and kind != "sqrt":
        return {**keys, "lr_schedule.lr_decay_style": kind}
    tail = steps - warmup if ratio is None else min(round(steps * float(ratio)), steps - warmup)
    return {
        **keys,
        "lr_schedule.lr_decay_style": "WSD",
        "lr_schedule.lr_wsd_decay_style": TAILS[kind],
        "lr_schedule.lr_wsd_decay_iters": tail,
    }


def _train(settings: Settings) -> Keys:
    keys: Keys = {
        "train.micro_batch_size": micro_batch_size(settings),
        "train.train_iters": int(settings["training.steps"]),
        "data.seq_length": int(settings["training.seq_len"]),
        "train.sample_prompt": "",
    }
    if (batch := _global_batch_size(settings)) is not None:
        keys["train.global_batch_size"] = batch
    if settings["training.seed"] is not None:
        keys["train.seed"] = int(settings["training.seed"])
    if settings["training.deterministic"]:
        keys["train.deterministic"] = True
    if settings["compile.enable"]:
        keys["train.compile"] = "blocks"
    return keys


def micro_batch_size(settings: Settings) -> int:
    """Samples of a forward pass. A pipeline cuts a rank's batch into micro-batches, of which mt counts as many as the
    global batch has: where that is not known they stay in one."""
    local = int(settings["training.local_batch_size"])
    micro = int(settings["parallelism.pipeline_parallel_microbatch_size"])
    if not _has_pipeline(settings) or _global_batch_size(settings) is None:
        return local
    if micro < 1 or local % micro:
        raise ConfigError(
            f"training.local_batch_size={local} is no multiple of parallelism.pipeline_parallel_microbatch_size={micro}"
        )
    return micro


def _global_batch_size(settings: Settings) -> int | None:
    """Samples of a step as the file has them; with a pipeline those of all data-parallel ranks, where the file says
    their number."""
    if (batch := int(settings["training.global_batch_size"])) > 0:
        return batch
    shards, replicas = (int(settings[f"parallelism.data_parallel_{key}_degree"]) for key in ("shard", "replicate"))
    if not _has_pipeline(settings) or shards < 1:
        return None
    return int(settings["training.local_batch_size"]) * shards * replicas


def _has_pipeline(settings: Settings) -> bool:
    return int(settings["parallelism.pipeline_parallel_degree"]) > 1


def _notes(settings: Settings) -> list[str]:
    if not _has_pipeline(settings) or _global_batch_size(settings) is not None:
        return []
    local = int(settings["training.local_batch_size"])
    micro = int(settings["parallelism.pipeline_parallel_microbatch_size"])
    return [
        f"a batch of {local} samples on each data-parallel rank goes through the pipeline in micro-batches of {micro}: "
        f"set train.micro_batch_size={micro} and train.global_batch_size={local} times the data-parallel ranks, whose "
        "number parallelism.data_parallel_shard_degree=-1 leaves open"
    ]


def _precision(settings: Settings) -> Keys:
    keys: Keys = {"precision.dtype": "bf16" if settings["training.mixed_precision_param"] == "bfloat16" else "fp32"}
    converters = settings["model.converters"] or []
    names = converters.split(",") if isinstance(converters, str) else list(converters)
    if unknown := [name for name in names if not str(name).endswith("float8") and not str(name).startswith("float8")]:
        raise ConfigError(f"model.converters={unknown} cannot be done; float8 can")
    if names:
        keys |= {"precision.fp8_format": "hybrid", "precision.fp8_recipe": "tensorwise"}
    return keys


def _parallel(settings: Settings) -> Keys:
    sizes = {"tensor": "tensor_model", "context": "context", "expert": "expert_model", "pipeline": "pipeline_model"}
    keys: Keys = {
        f"parallel.{ours}_parallel_size": size
        for theirs, ours in sizes.items()
        if (size := int(settings[f"parallelism.{theirs}_parallel_degree"])) > 1
    }
    if int(settings["parallelism.tensor_parallel_degree"]) > 1:
        keys["parallel.sequence_parallel"] = True
    if int(settings["parallelism.expert_parallel_degree"]) > 1:
        keys["parallel.expert_tensor_parallel_size"] = int(settings["parallelism.expert_tensor_parallel_degree"])
    if settings["parallelism.enable_async_tensor_parallel"]:
        keys["parallel.tp_comm_overlap"] = True
    return keys | _pipeline(settings) | _sharding(settings)


def _pipeline(settings: Settings) -> Keys:
    if not _has_pipeline(settings):
        return {}
    schedule = str(settings["parallelism.pipeline_parallel_schedule"])
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule={schedule} is not read; it can be {', '.join(SCHEDULES)}"
        )
    keys: Keys = {"parallel.pipeline_schedule": SCHEDULES[schedule]}
    if schedule not in SINGLE_STAGE:
        keys["parallel.virtual_pipeline_model_parallel_size"] = 2
    return keys


def _sharding(settings: Settings) -> Keys:
    replicas = int(settings["parallelism.data_parallel_replicate_degree"])
    shards = int(settings["parallelism.data_parallel_shard_degree"])
    if shards == 1:
        return {}
    if replicas > 1:
        raise ConfigError(
            f"parallelism.data_parallel_replicate_degree={replicas} with data_parallel_shard_degree={shards}: shards "
            "that are replicated in groups (HSDP) cannot be done; one of the two can be 1"
        )
    reshard = settings["parallelism.fsdp_reshard_after_forward"]
    # By default not within a pipeline, where the next micro-batch needs the weights at once.
    always = reshard == "always" or (reshard == "default" and settings["parallelism.pipeline_parallel_degree"] == 1)
    return {"parallel.use_torch_fsdp2": True, "parallel.fsdp_reshard_after_forward": always}


def _recompute(settings: Settings) -> Keys:
    mode = settings["activation_checkpoint.mode"]
    if mode == "full":
        return {
            "recompute.recompute_granularity": "full",
            "recompute.recompute_method": "uniform",
            "recompute.recompute_num_layers": 1,
        }
    return {"recompute.recompute_granularity": "none" if mode == "none" else "selective"}


def _checkpoint(settings: Settings) -> Keys:
    keys: Keys = {"checkpoint.save_interval": None}
    if settings["checkpoint.enable"]:
        keep = int(settings["checkpoint.keep_latest_k"])
        keys = {"checkpoint.save_interval": int(settings["checkpoint.interval"])}
        keys |= {"checkpoint.keep_last": keep} if keep else {}
    if path := settings["checkpoint.initial_load_path"]:
        keys["checkpoint.load"] = path
    return keys


def _logging(settings: Settings) -> Keys:
    trackers = {"tensorboard": "metrics.enable_tensorboard", "wandb": "metrics.enable_wandb"}
    keys: Keys = {"logging.log_interval": int(settings["metrics.log_freq"])}
    if used := [tracker for tracker, key in trackers.items() if settings[key]]:
        keys["logging.trackers"] = used
    return keys


RULES: Mapping[str, Callable[[Settings], Keys]] = {
    "optimizer": _optimizer,
    "lr_scheduler": _schedule,
    "training": _train,
    "precision": _precision,
    "parallelism": _parallel,
    "activation_checkpoint": _recompute,
    "checkpoint": _checkpoint,
    "metrics": _logging,
}
"""What is read together."""
READ_BY: Mapping[str, str] = {
    "training.max_norm": "optimizer",
    "lr_scheduler.min_lr_factor": "optimizer",
    "training.mixed_precision_param": "precision",
    "model.converters": "precision",
    "compile.enable": "training",
}
"""Keys that another rule than that of their section reads."""
OWN_KEYS = ("training.seed", "training.deterministic", "checkpoint.enable", "checkpoint.folder")


def _account(key: str, value: Any, decided: Mapping[str, Keys], settings: Settings) -> Account:
    words = f"{key} {value}"
    if key in ("model.name", "model.flavor"):
        return Account(words, "translated", {"model.family": family_of(*_chosen(settings))}, "")
    if key in REFUSED and value:
        return Account(words, "refused", {}, REFUSED[key])
    section, today = key.partition(".")[0], OLD_NAMES.get(key, key)
    read = today in DEFAULTS or today in READ_BY or today in OWN_KEYS or today.startswith("metrics.enable_")
    if read and (keys := _decided_by(today, decided[READ_BY.get(today, today.partition(".")[0])])):
        return Account(words, "translated", keys, "")
    if section not in IDLE and section not in RULES:
        raise ConfigError(f"[{section}] is no section of torchtitan's{did_you_mean(section, [*IDLE, *RULES])}")
    reason = IDLE.get(section, "says what is so without it")
    return Account(words, "no effect", {}, reason)


def _chosen(settings: Settings) -> tuple[str, str]:
    return str(settings["model.name"]), str(settings["model.flavor"])


WORDS: Mapping[str, tuple[str, ...]] = {
    "lr": ("optimizer.lr", "optimizer.min_lr"),
    "eps": ("optimizer.adam_eps",),
    "beta1": ("optimizer.adam_beta1",),
    "beta2": ("optimizer.adam_beta2",),
    "name": ("optimizer.optimizer",),
    "weight_decay": ("optimizer.weight_decay",),
    "max_norm": ("optimizer.clip_grad",),
    "min_lr_factor": ("optimizer.min_lr",),
    "local_batch_size": ("train.micro_batch_size",),
    "global_batch_size": ("train.global_batch_size",),
    "seq_len": ("data.seq_length",),
    "steps": ("train.train_iters",),
    "seed": ("train.seed",),
    "deterministic": ("train.deterministic",),
    "compile": ("train.compile",),
    "tensor_parallel_degree": ("parallel.tensor_model_parallel_size", "parallel.sequence_parallel"),
    "pipeline_parallel_degree": ("parallel.pipeline_model_parallel_size",),
    "pipeline_parallel_microbatch_size": ("train.micro_batch_size",),
    "context_parallel_degree": ("parallel.context_parallel_size",),
    "data_parallel_replicate_degree": (),
    "expert_parallel_degree": ("parallel.expert_model_parallel_size",),
    "expert_tensor_parallel_degree": ("parallel.expert_tensor_parallel_size",),
    "data_parallel_shard_degree": ("parallel.use_torch_fsdp2",),
    "fsdp_reshard_after_forward": ("parallel.fsdp_reshard_after_forward",),
    "pipeline_parallel_schedule": ("parallel.pipeline_schedule", "parallel.virtual_pipeline_model_parallel_size"),
    "interval": ("checkpoint.save_interval",),
    "enable": ("checkpoint.save_interval",),
    "keep_latest_k": ("checkpoint.keep_last",),
    "log_freq": ("logging.log_interval",),
    "enable_tensorboard": ("logging.trackers",),
    "enable_wandb": ("logging.trackers",),
}
"""Last part of a key -> the keys that it decides, of those that its rule wrote; of others all of them."""


def _decided_by(key: str, keys: Keys) -> Keys:
    name = key.rpartition(".")[2]
    if key == "compile.enable":
        name = "compile"
    return {ours: keys[ours] for ours in WORDS.get(name, tuple(keys)) if ours in keys}
