"""`mt launch`: a script on several processes, with the variables that `accelerate launch` sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_core.config.files import read_values
from mt_core.errors import ConfigError, did_you_mean
from mt_import.readers.accelerate import PREFIX, TOP, VARIABLE_PREFIX, import_accelerate

# -- options of `accelerate launch`: those before the program are the launcher's ---------------------

VALUES: Mapping[str, str] = {
    "num_processes": "num_processes",
    "nproc": "num_processes",
    "num_machines": "num_machines",
    "machine_rank": "machine_rank",
    "main_process_ip": "main_process_ip",
    "main_process_port": "main_process_port",
    "mixed_precision": "mixed_precision",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "num_cpu_threads_per_process": "num_cpu_threads_per_process",
    "max_restarts": "max_restarts",
    "log_dir": "log_dir",
}
"""Option with a value -> key of Accelerate's file, or of what only the launcher uses."""
FLAGS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"use_cpu": True},
    "multi_gpu": {},
    "use_megatron_lm": {"distributed_type": "MEGATRON_LM"},
    "module": {"module": True},
    "m": {"module": True},
    "quiet": {},
    "same_network": {},
}
"""Option without a value -> keys."""
FORCED: Mapping[str, str] = {
    "use_deepspeed": "MegatronLMPlugin's fields share the work: --use_megatron_lm",
    "use_fsdp": "--use_megatron_lm --megatron_lm_use_custom_fsdp true is FSDP2",
    "use_parallelism_config": "--use_megatron_lm --megatron_lm_tp_degree N",
    "tpu": "mt runs on CPUs and CUDA GPUs",
    "dynamo_backend": "call torch.compile in the program",
    "no_python": "the program is a Python file",
    "gpu_ids": "set CUDA_VISIBLE_DEVICES",
}
"""Options that are refused -> what does the same."""


@dataclass
class LaunchOptions:
    """config_file: of --config_file. values: keys by option, which win over the file's. program: and its arguments."""

    config_file: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    program: list[str] = field(default_factory=list)


def read_options(words: Sequence[str]) -> LaunchOptions:
    """Raises ConfigError for an unknown option, a missing value and a missing program."""
    options, rest = LaunchOptions(), list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, given, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in FLAGS and not given:
            options.values |= FLAGS[name]
            continue
        key = _key(name, word)
        if not given:
            if not rest:
                raise ConfigError(f"{word} needs a value")
            value = rest.pop(0)
        if key == "config_file":
            options.config_file = value
        else:
            options.values[key] = _typed(value)
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest:
        raise ConfigError("mt launch needs a program: mt launch [OPTIONS] FILE [ITS ARGUMENTS]")
    # `FILE -- --option`, as earlier versions of mt required it, too.
    options.program = [rest[0], *(rest[2:] if rest[1:2] == ["--"] else rest[1:])]
    return options


def _key(name: str, word: str) -> str:
    if name == "config_file":
        return name
    if name in FORCED:
        raise ConfigError(f"{word}: {FORCED[name]}")
    if name in VALUES:
        return VALUES[name]
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) in MegatronLMPlugin.model_fields:
        return f"megatron_lm_config.{name}"
    fields = [PREFIX + one for one in MegatronLMPlugin.model_fields]
    known = ["config_file", *VALUES, *FLAGS, *fields]
    raise ConfigError(
        f"mt launch has no option {word}{did_you_mean(name, known)}; options of the program stand behind its file"
    )


def _typed(value: str) -> Any:
    """Numbers and truth values of a command line, as YAML has them."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if value.isdecimal() else value


def merged(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The file's keys with those of options."""
    keys, prefix = dict(values), "megatron_lm_config."
    plugin = dict(keys.get("megatron_lm_config") or {})
    for key, value in options.items():
        if key.startswith(prefix):
            plugin[key.removeprefix(prefix)] = value
            keys["distributed_type"] = "MEGATRON_LM"
        else:
            keys[key] = value
    return {**keys, "megatron_lm_config": plugin} if plugin else keys


PLAIN_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU")
NOT_DONE: Mapping[str, str] = {
    "deepspeed_config": FORCED["use_deepspeed"],
    "fsdp_config": FORCED["use_fsdp"],
    "parallelism_config": FORCED["use_parallelism_config"],
    "fp8_config": "mixed_precision: fp8 is precision.fp8_format of mt",
    "dynamo_config": FORCED["dynamo_backend"],
    "dynamo_backend": FORCED["dynamo_backend"],
    "gpu_ids": FORCED["gpu_ids"],
    "mpirun_config": "torchrun starts the processes",
    "downcast_bf16": FORCED["tpu"],
    "commands": FORCED["tpu"],
    "command_file": FORCED["tpu"],
}
"""Keys of Accelerate's file -> what does the same."""
UNSET: tuple[Any, ...] = (None, False, "", "no", "NO", "false", "all", {}, [])
"""Values with which such a key asks for nothing."""
DEFAULT_PORT = 29500
LAUNCHERS = ("module", "num_cpu_threads_per_process", "max_restarts", "log_dir", "gradient_accumulation_steps")
"""Values that the launcher alone uses, which Accelerate's file does not have."""
TORCHRUN: Mapping[str, str] = {"max_restarts": "--max-restarts", "log_dir": "--log-dir"}


def launch(
    words: Annotated[
        list[str], typer.Argument(metavar="[OPTIONS] FILE [ARGUMENTS]", help="Options of accelerate launch.")
    ],
) -> None:
    """Run a script for Accelerate on several processes; torchrun starts them."""
    options = read_options(words)
    values = checked_values(merged(_read(options.config_file), options.values))
    command = launch_command(values, None, options.program)
    raise typer.Exit(subprocess.call(command, env={**os.environ, **launch_variables(values)}))


# The words are read by `launch_options`: the program's own options stand behind its file without a `--`.
launch.context_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # type: ignore[attr-defined]


def launch_command(values: Mapping[str, Any], num_processes: int | None, program: list[str]) -> list[str]:
    """torchrun with the processes of this machine. Raises ConfigError for numbers that do not fit."""
    total, machines = num_processes or int(values.get("num_processes") or 1), int(values.get("num_machines") or 1)
    if total % machines:
        raise ConfigError(f"num_processes={total} is no multiple of num_machines={machines}; it counts all machines'")
    # This interpreter's torchrun, whatever PATH has first.
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(total // machines)]
    words += [word for key, option in TORCHRUN.items() if key in values for word in (option, str(values[key]))]
    program = ["-m", *program] if values.get("module") else program
    if machines == 1:
        return [*words, "--standalone", *program]
    if values.get("main_process_ip") is None:
        raise ConfigError(f"num_machines={machines} needs main_process_ip, the address of the first")
    words += ["--nnodes", str(machines), "--node-rank", str(values.get("machine_rank") or 0)]
    words += ["--master-addr", str(values["main_process_ip"])]
    return [*words, "--master-port", str(values.get("main_process_port") or DEFAULT_PORT), *program]


def launch_variables(values: Mapping[str, Any]) -> dict[str, str]:
    """What `accelerate launch` passes to the program in the environment."""
    fields = {
        f"{VARIABLE_PREFIX}{name.removeprefix(PREFIX).upper()}": str(value)
        for name, value in (values.get("megatron_lm_config") or {}).items()
    }
    variables = dict(fields)
    if uses_megatron(values):
        variables["ACCELERATE_USE_MEGATRON_LM"] = "true"
    variables["ACCELERATE_MIXED_PRECISION"] = str(values.get("mixed_precision") or "no")
    if values.get("use_cpu"):
        variables["ACCELERATE_USE_CPU"] = "true"
    if steps := values.get("gradient_accumulation_steps"):
        variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(steps)
    if threads := values.get("num_cpu_threads_per_process"):
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables


def uses_megatron(values: Mapping[str, Any]) -> bool:
    return values.get("distributed_type") == "MEGATRON_LM" or bool(values.get("megatron_lm_config"))


def checked_values(values: dict[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for keys and fields that Accelerate does not have."""
    keys = {key: value for key, value in values.items() if key not in LAUNCHERS}
    if uses_megatron(values):
        # For its checks alone: the program reads the values from the environment.
        import_accelerate(keys, "mt launch")
    else:
        _require_plain(keys)
    return values


def _require_plain(keys: Mapping[str, Any]) -> None:
    """Raises ConfigError for what `mt launch` would leave out of a file without Megatron-LM."""
    for key, value in keys.items():
        if key not in TOP:
            raise ConfigError(f"mt launch: Accelerate has no key {key}{did_you_mean(key, TOP)}")
        if key in NOT_DONE and value not in UNSET and not _is_off(value):
            raise ConfigError(f"mt launch: {key}={value!r} is not done: {NOT_DONE[key]}")
    kind = str(keys.get("distributed_type", "NO"))
    if kind not in PLAIN_TYPES:
        raise ConfigError(
            f"mt launch: distributed_type={kind} is not done; it can be {', '.join(PLAIN_TYPES)}, MEGATRON_LM "
            "(docs/guides/parallelism.md has what corresponds to FSDP and DeepSpeed)"
        )


def _is_off(value: Any) -> bool:
    """Settings of torch.compile that turn it off."""
    return isinstance(value, Mapping) and str(value.get("dynamo_backend", "")).lower() == "no"


def _read(path: str | None) -> Mapping[str, Any]:
    """The file's keys. Raises ConfigError for one that is not Accelerate's."""
    if path is None:
        return {}
    values = read_values(Path(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}, expected the keys of accelerate config")
    return values
