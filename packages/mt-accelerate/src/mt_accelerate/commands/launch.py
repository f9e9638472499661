"""`mt launch`: a script on several processes, with the variables that `accelerate launch` sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mt_core.config.files import read_values
from mt_core.errors import ConfigError
from mt_tools.config_import.accelerate import PREFIX, VARIABLE_PREFIX, import_accelerate

DEFAULT_PORT = 29500


def launch(
    script: Annotated[Path, typer.Argument(help="The program.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments; options stand behind `--`.")] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config_file", "--config-file", help="Accelerate's YAML.")
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option("--num_processes", "--nproc", help="In place of the file's.")
    ] = None,
) -> None:
    """Run a script for Accelerate's Megatron-LM plugin; torchrun starts its processes."""
    values = _read(config_file)
    command = launch_command(values, num_processes, [str(script), *(arguments or [])])
    raise typer.Exit(subprocess.call(command, env={**os.environ, **launch_variables(values)}))


def launch_command(values: Mapping[str, Any], num_processes: int | None, program: list[str]) -> list[str]:
    """torchrun with the processes of this machine. Raises ConfigError for numbers that do not fit."""
    total, machines = num_processes or int(values.get("num_processes") or 1), int(values.get("num_machines") or 1)
    if total % machines:
        raise ConfigError(f"num_processes={total} is no multiple of num_machines={machines}; it counts all machines'")
    # This interpreter's torchrun, whatever PATH has first.
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(total // machines)]
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
    variables = {**given, "ACCELERATE_USE_MEGATRON_LM": "true"}
    variables["ACCELERATE_MIXED_PRECISION"] = str(values.get("mixed_precision") or "no")
    return {**variables, **({"ACCELERATE_USE_CPU": "true"} if values.get("use_cpu") else {})}


def _read(path: Path | None) -> Mapping[str, Any]:
    """The file's keys. Raises ConfigError for one that is not Accelerate's, or has keys that it does not know."""
    if path is None:
        return {}
    values = read_values(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}, expected the keys of accelerate config")
    # For its checks alone: the program reads the values from the environment.
    import_accelerate(values, path.name)
    return values
