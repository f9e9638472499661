"""The options of `accelerate launch`: those before the program are the launcher's, those behind it its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    found, rest = LaunchOptions(), list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, given, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in FLAGS and not given:
            found.values |= FLAGS[name]
            continue
        key = _key(name, word)
        if not given:
            if not rest:
                raise ConfigError(f"{word} needs a value")
            value = rest.pop(0)
        if key == "config_file":
            found.config_file = value
        else:
            found.values[key] = _typed(value)
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest:
        raise ConfigError("mt launch needs a program: mt launch [OPTIONS] FILE [ITS ARGUMENTS]")
    # `FILE -- --option`, as earlier versions of mt required it, too.
    found.program = [rest[0], *(rest[2:] if rest[1:2] == ["--"] else rest[1:])]
    return found


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
    found, prefix = dict(values), "megatron_lm_config."
    plugin = dict(found.get("megatron_lm_config") or {})
    for key, value in options.items():
        if key.startswith(prefix):
            plugin[key.removeprefix(prefix)] = value
            found["distributed_type"] = "MEGATRON_LM"
        else:
            found[key] = value
    return {**found, "megatron_lm_config": plugin} if plugin else found
