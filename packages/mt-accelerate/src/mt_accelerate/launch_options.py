"""Options of `accelerate launch`, which stand before the program: each is done, changes nothing, or is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_core.errors import ConfigError, did_you_mean
from mt_import.readers.accelerate import PREFIX

VALUES: Mapping[str, str] = {
    "num_processes": "num_processes",
    "nproc": "num_processes",
    "num_machines": "num_machines",
    "machine_rank": "machine_rank",
    "main_process_ip": "main_process_ip",
    "main_process_port": "main_process_port",
    "rdzv_backend": "rdzv_backend",
    "rdzv_conf": "rdzv_conf",
    "gpu_ids": "gpu_ids",
    "mixed_precision": "mixed_precision",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "num_cpu_threads_per_process": "num_cpu_threads_per_process",
    "max_restarts": "max_restarts",
    "monitor_interval": "monitor_interval",
    "role": "role",
    "log_dir": "log_dir",
    "tee": "tee",
    "t": "tee",
}
"""Option with a value -> key of Accelerate's file, or of what only the launcher uses."""
NUMBERS = (
    *("num_processes", "num_machines", "machine_rank", "main_process_port", "max_restarts"),
    *("gradient_accumulation_steps", "num_cpu_threads_per_process"),
)
"""Keys whose value is a whole number."""
FLAGS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"use_cpu": True},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "use_megatron_lm": {"distributed_type": "MEGATRON_LM"},
    "module": {"module": True},
    "m": {"module": True},
    "no_python": {"no_python": True},
    "debug": {"debug": True},
    "enable_cpu_affinity": {"enable_cpu_affinity": True},
    # Without effect: what they change is of DeepSpeed's launcher, of TPUs, or of torch.compile, which is off.
    "quiet": {},
    "q": {},
    "same_network": {},
    "no_tpu_cluster": {},
    "downcast_bf16": {},
    "dynamo_use_fullgraph": {},
    "dynamo_use_dynamic": {},
    "dynamo_use_regional_compilation": {},
}
"""Option without a value -> keys."""
WITHOUT_EFFECT = ("main_training_function", "dynamo_mode")
"""Options with a value that count on TPUs, or with a backend of torch.compile."""

DEEPSPEED = "MegatronLMPlugin's fields share the work: --use_megatron_lm"
FSDP = "--use_megatron_lm --megatron_lm_use_custom_fsdp true is FSDP2"
PARALLELISM = "--use_megatron_lm --megatron_lm_tp_degree N"
TPU = "mt runs on CPUs and CUDA GPUs"
FP8 = "--mixed_precision fp8 with --use_megatron_lm is mt's precision.fp8_format"
DYNAMO = "call torch.compile in the program"
AWS = "mt starts processes on its own machines alone"
REFUSED_FLAGS: Mapping[str, str] = {
    "use_deepspeed": DEEPSPEED,
    "use_fsdp": FSDP,
    "use_parallelism_config": PARALLELISM,
    "tpu": TPU,
    "tpu_cluster": TPU,
    "tpu_use_sudo": TPU,
    "fp8_use_autocast_during_eval": FP8,
    "h": "mt launch --help",
}
"""Options without a value that are refused -> what does the same."""
REFUSED_VALUES: Mapping[str, str] = {
    "dynamo_backend": DYNAMO,
    "vm": TPU,
    "env": TPU,
    "mpirun_hostfile": "torchrun starts the processes; start mt launch on each machine, with --machine_rank",
    "aws_access_key_id": AWS,
    "aws_secret_access_key": AWS,
    **dict.fromkeys(("zero_stage", "gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model"), DEEPSPEED),
    **dict.fromkeys(("offload_optimizer_device", "offload_param_device"), DEEPSPEED),
    **dict.fromkeys(("offload_optimizer_nvme_path", "offload_param_nvme_path"), DEEPSPEED),
}
"""Options with a value that are refused, unless it turns them off -> what does the same."""
REFUSED_PREFIXES: Mapping[str, str] = {
    "deepspeed_": DEEPSPEED,
    "fsdp_": FSDP,
    "fp8_": FP8,
    "parallelism_config_": PARALLELISM,
}
"""Beginnings of further options of this kind."""
OFF = ("no", "false", "none", "")


@dataclass
class LaunchOptions:
    """config_file: of --config_file. values: keys by option, which win over the file's. program: and its arguments."""

    config_file: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    program: list[str] = field(default_factory=list)


def read_options(words: Sequence[str]) -> LaunchOptions:
    """Raises ConfigError for an option that is unknown or refused, a missing value and a missing program."""
    options, rest = LaunchOptions(), list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, has_value, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in REFUSED_FLAGS:
            raise ConfigError(f"{word}: {REFUSED_FLAGS[name]}")
        if name in FLAGS and not has_value:
            options.values |= FLAGS[name]
            # Command lines have it as the file does: --downcast_bf16 no.
            if name == "downcast_bf16" and rest[:1] == ["no"] and not Path("no").exists():
                rest.pop(0)
            continue
        _require_known(name, word)
        if not has_value:
            if not rest:
                raise ConfigError(f"{word} needs a value")
            value = rest.pop(0)
        _add(options, name, value)
    _require_consistent(options.values)
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest:
        raise ConfigError("mt launch needs a program: mt launch [OPTIONS] FILE [ITS ARGUMENTS]")
    # `FILE -- --option`, as earlier versions of mt required it, too.
    options.program = [rest[0], *(rest[2:] if rest[1:2] == ["--"] else rest[1:])]
    return options


def _require_consistent(values: Mapping[str, Any]) -> None:
    multi = values.get("distributed_type") == "MULTI_GPU"
    if multi and values.get("use_cpu"):
        raise ConfigError("--cpu and --multi_gpu: give one of them")
    if multi and values.get("num_processes") in (0, 1):
        raise ConfigError("--multi_gpu needs at least 2 processes; leave it out for one")
    if values.get("module") and values.get("no_python"):
        raise ConfigError("--module and --no_python: give one of them")


def _add(options: LaunchOptions, name: str, value: str) -> None:
    if (reason := refused_value(name)) is not None:
        if value.lower() not in OFF:
            raise ConfigError(f"--{name} {value}: {reason}")
    elif name == "config_file":
        options.config_file = value
    elif name in VALUES:
        key = VALUES[name]
        options.values[key] = _number(name, value) if key in NUMBERS else value
    elif name not in WITHOUT_EFFECT:
        options.values[f"megatron_lm_config.{name}"] = _typed(value)


def refused_value(name: str) -> str | None:
    """What does the same as an option with a value that is not done; None for others."""
    prefixes = (reason for prefix, reason in REFUSED_PREFIXES.items() if name.startswith(prefix))
    return REFUSED_VALUES.get(name) or next(prefixes, None)


def _require_known(name: str, word: str) -> None:
    fields = [PREFIX + option for option in MegatronLMPlugin.model_fields]
    known = ["config_file", *VALUES, *FLAGS, *WITHOUT_EFFECT, *fields]
    if name not in known and refused_value(name) is None:
        raise ConfigError(
            f"mt launch has no option {word}{did_you_mean(name, known)}; options of the program stand behind its file"
        )
    if name in FLAGS:
        raise ConfigError(f"{word}: --{name} takes no value")


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ConfigError(f"--{name} {value}: it has to be a whole number")
    return int(value)


def _typed(value: str) -> Any:
    """Numbers and truth values of a command line, as YAML has them."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if value.isdecimal() else value


def merged(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The file's keys with those of options."""
    keys, prefix = dict(values), "megatron_lm_config."
    plugin = dict(keys.get("megatron_lm_config") or {})
    if options.get("use_cpu") and keys.get("distributed_type") == "MULTI_GPU":
        keys["distributed_type"] = "MULTI_CPU"
    for key, value in options.items():
        if key.startswith(prefix):
            plugin[key.removeprefix(prefix)] = value
            keys["distributed_type"] = "MEGATRON_LM"
        else:
            keys[key] = value
    return {**keys, "megatron_lm_config": plugin} if plugin else keys
