"""`mt launch`: a script on several processes, with the variables that `accelerate launch` sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mt_accelerate.launch_options import (
    AWS,
    DEEPSPEED,
    DYNAMO,
    FP8,
    FSDP,
    PARALLELISM,
    TPU,
    merged,
    read_options,
)
from mt_core.config.files import read_values
from mt_core.errors import ConfigError, did_you_mean
from mt_import.readers.accelerate import DTYPES, PREFIX, TOP, VARIABLE_PREFIX, import_accelerate

PLAIN_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU")
NOT_DONE: Mapping[str, str] = {
    "deepspeed_config": DEEPSPEED,
    "fsdp_config": FSDP,
    "parallelism_config": PARALLELISM,
    "fp8_config": FP8,
    "dynamo_config": DYNAMO,
    "dynamo_backend": DYNAMO,
    "mpirun_config": "torchrun starts the processes",
    "downcast_bf16": TPU,
    "commands": TPU,
    "command_file": TPU,
}
"""Keys of Accelerate's file -> what does the same."""
UNSET: tuple[Any, ...] = (None, False, "", "no", "NO", "false", "all", {}, [])
"""Values with which such a key asks for nothing."""
LOCAL = ("LOCAL_MACHINE", None)
RENDEZVOUS = ("static", "c10d")
DEFAULT_PORT = 29500
TORCHRUN: Mapping[str, str] = {
    "max_restarts": "--max-restarts",
    "monitor_interval": "--monitor-interval",
    "role": "--role",
    "rdzv_conf": "--rdzv-conf",
    "log_dir": "--log-dir",
    "tee": "--tee",
}
LAUNCHERS = (*TORCHRUN, "module", "no_python", "num_cpu_threads_per_process", "gradient_accumulation_steps")
"""Values that the launcher alone uses, which Accelerate's file does not have."""
IDLE: Mapping[str, str] = {
    "debug": "ACCELERATE_DEBUG_MODE is set, and mt makes no further checks of collectives by it",
    "enable_cpu_affinity": "processes are not bound to cores; numactl and taskset do so",
}
"""Settings that change no result -> what becomes of them, for stderr."""


def launch(
    words: Annotated[
        list[str], typer.Argument(metavar="[OPTIONS] FILE [ARGUMENTS]", help="Options of accelerate launch.")
    ],
) -> None:
    """Run a script for Accelerate on several processes; torchrun starts them."""
    options = read_options(words)
    path = _file(options.config_file, options.values)
    values = checked_values(merged(_read(path), options.values))
    for key, reason in IDLE.items():
        if values.get(key) not in UNSET:
            _say(f"{key}: {reason}")
    values["num_processes"] = number_of_processes(values)
    command = launch_command(values, None, options.program)
    raise typer.Exit(subprocess.call(command, env={**os.environ, **launch_variables(values)}))


# The words are read by `read_options`: the program's own options stand behind its file without a `--`.
launch.context_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # type: ignore[attr-defined]


def _say(text: str) -> None:
    print(f"mt launch: {text}", file=sys.stderr)


# -- the file of `accelerate config` -----------------------------------------------------------------


def default_file() -> Path:
    """Where `accelerate config` writes."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def _file(config_file: str | None, options: Mapping[str, Any]) -> Path | None:
    """The file to read. As `accelerate launch`, which takes the default one unless there is --cpu."""
    if config_file is not None:
        return Path(config_file)
    path = default_file()
    if options.get("use_cpu") or not path.is_file():
        return None
    _say(f"reads {path}, as accelerate launch does without --config_file; with --cpu it is left out")
    return path


def _read(path: Path | None) -> Mapping[str, Any]:
    """The file's keys. Raises ConfigError for one that is not Accelerate's."""
    if path is None:
        return {}
    values = read_values(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}, expected the keys of accelerate config")
    return values


def checked_values(values: dict[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for keys and fields that Accelerate does not have, and for what is not done."""
    keys = {key: value for key, value in values.items() if key not in LAUNCHERS}
    _require_choice(keys, "rdzv_backend", RENDEZVOUS)
    _require_choice(keys, "mixed_precision", tuple(DTYPES))
    if keys.get("compute_environment") not in LOCAL:
        raise ConfigError(f"mt launch: compute_environment={keys['compute_environment']} is not done: {AWS}")
    if uses_megatron(values):
        # For its checks alone: the program reads the values from the environment.
        import_accelerate(keys, "mt launch")
    else:
        _require_plain(keys)
    return values


def uses_megatron(values: Mapping[str, Any]) -> bool:
    return values.get("distributed_type", "MEGATRON_LM" if values.get("megatron_lm_config") else "NO") == "MEGATRON_LM"


def _require_choice(keys: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> None:
    value = keys.get(name)
    # YAML reads a `no` without quotation marks as false.
    if value not in (None, "", False) and str(value).lower() not in choices:
        raise ConfigError(f"mt launch: {name}={value} is not done; it can be {', '.join(choices)}")


def _require_plain(keys: Mapping[str, Any]) -> None:
    """Raises ConfigError for what `mt launch` would leave out of a file without Megatron-LM."""
    for key, value in keys.items():
        if key not in TOP:
            raise ConfigError(f"mt launch: Accelerate has no key {key}{did_you_mean(key, TOP)}")
        if key in NOT_DONE and value not in UNSET and not _is_off(value):
            raise ConfigError(f"mt launch: {key}={value!r} is not done: {NOT_DONE[key]}")
    # YAML reads a `NO` without quotation marks as false.
    kind = str(keys.get("distributed_type") or "NO")
    if kind not in PLAIN_TYPES:
        raise ConfigError(
            f"mt launch: distributed_type={kind} is not done; it can be {', '.join(PLAIN_TYPES)}, MEGATRON_LM "
            "(docs/guides/parallelism.md has what corresponds to FSDP and DeepSpeed)"
        )


def _is_off(value: Any) -> bool:
    """Settings of torch.compile that turn it off."""
    return isinstance(value, Mapping) and str(value.get("dynamo_backend", "")).lower() == "no"


# -- the processes -----------------------------------------------------------------------------------


def number_of_processes(values: Mapping[str, Any]) -> int:
    """Processes on all machines: one for each CUDA device, as `accelerate launch`, unless it is given.

    Raises ConfigError for --multi_gpu where there is no device.
    """
    num_processes = values.get("num_processes")
    # -1: what `accelerate config` leaves where it was not asked.
    if num_processes is not None and int(num_processes) > 0:
        return int(num_processes)
    if values.get("use_cpu"):
        return int(values.get("num_machines") or 1)
    devices = number_of_devices(values)
    if values.get("distributed_type") == "MULTI_GPU" and not devices:
        raise ConfigError(
            "--multi_gpu: torch sees no CUDA device here; give --num_processes N, with --cpu in place of --multi_gpu "
            "for processes on CPUs"
        )
    total = max(devices, 1) * int(values.get("num_machines") or 1)
    if devices > 1:
        _say(f"{total} processes, one for each CUDA device; --num_processes N is another number")
    return total


def number_of_devices(values: Mapping[str, Any]) -> int:
    """Visible CUDA devices of this machine, or those of gpu_ids."""
    if chosen := _chosen_devices(values):
        return len(chosen.split(","))
    import torch

    return torch.cuda.device_count()


def _chosen_devices(values: Mapping[str, Any]) -> str | None:
    """gpu_ids, as CUDA_VISIBLE_DEVICES has them; None for all."""
    chosen = values.get("gpu_ids")
    # YAML reads `0` as a number, which is one device.
    return None if chosen in (None, "", "all") else str(chosen).replace(" ", "")


def launch_command(values: Mapping[str, Any], num_processes: int | None, program: list[str]) -> list[str]:
    """torchrun with the processes of this machine. Raises ConfigError for numbers that do not fit."""
    total, machines = num_processes or int(values.get("num_processes") or 1), int(values.get("num_machines") or 1)
    if total % machines:
        raise ConfigError(f"num_processes={total} is no multiple of num_machines={machines}; it counts all machines'")
    # This interpreter's torchrun, whatever PATH has first.
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(total // machines)]
    words += [word for key, option in TORCHRUN.items() if values.get(key) for word in (option, str(values[key]))]
    program = ["-m", *program] if values.get("module") else program
    program = ["--no-python", *program] if values.get("no_python") else program
    if machines == 1:
        # A free port and c10d; the same for one machine as `static`.
        return [*words, "--standalone", *program]
    if values.get("main_process_ip") is None:
        raise ConfigError(f"num_machines={machines} needs main_process_ip, the address of the first")
    address, port = str(values["main_process_ip"]), str(values.get("main_process_port") or DEFAULT_PORT)
    words += ["--nnodes", str(machines), "--node-rank", str(values.get("machine_rank") or 0)]
    if str(values.get("rdzv_backend")).lower() == "c10d":
        return [*words, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}", *program]
    return [*words, "--master-addr", address, "--master-port", port, *program]


def launch_variables(values: Mapping[str, Any]) -> dict[str, str]:
    """What `accelerate launch` passes to the program in the environment."""
    variables: dict[str, str] = {}
    if uses_megatron(values):
        fields = values.get("megatron_lm_config") or {}
        variables = {
            f"{VARIABLE_PREFIX}{name.removeprefix(PREFIX).upper()}": str(value) for name, value in fields.items()
        }
        variables["ACCELERATE_USE_MEGATRON_LM"] = "true"
    variables["ACCELERATE_MIXED_PRECISION"] = str(values.get("mixed_precision") or "no")
    if values.get("use_cpu"):
        variables["ACCELERATE_USE_CPU"] = "true"
    if values.get("debug"):
        variables["ACCELERATE_DEBUG_MODE"] = "true"
    if chosen := _chosen_devices(values):
        variables["CUDA_VISIBLE_DEVICES"] = chosen
    if steps := values.get("gradient_accumulation_steps"):
        variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(steps)
    if threads := values.get("num_cpu_threads_per_process"):
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables
