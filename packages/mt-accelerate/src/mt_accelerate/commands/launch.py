"""`mt launch`: a script on several processes, with the variables that `accelerate launch` sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mt_accelerate.commands.launch_options import merged, read_options
from mt_core.config.files import read_values
from mt_core.errors import ConfigError
from mt_import.readers.accelerate import PREFIX, VARIABLE_PREFIX, import_accelerate

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
    values = _checked(merged(_read(options.config_file), options.values))
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
    given = {
        f"{VARIABLE_PREFIX}{name.removeprefix(PREFIX).upper()}": str(value)
        for name, value in (values.get("megatron_lm_config") or {}).items()
    }
    variables = dict(given)
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


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for keys and fields that Accelerate does not have."""
    if uses_megatron(values):
        # For its checks alone: the program reads the values from the environment.
        import_accelerate({key: value for key, value in values.items() if key not in LAUNCHERS}, "mt launch")
    return values


def _read(path: str | None) -> Mapping[str, Any]:
    """The file's keys. Raises ConfigError for one that is not Accelerate's."""
    if path is None:
        return {}
    values = read_values(Path(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}, expected the keys of accelerate config")
    return values
