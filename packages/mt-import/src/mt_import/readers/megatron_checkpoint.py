"""The arguments that Megatron's checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_import.megatron_arguments.command_line import Given
from mt_import.megatron_arguments.entry_scripts import entry_script
from mt_import.megatron_arguments.table import by_dest
from mt_import.megatron_arguments.translation import translate
from mt_import.readers.megatron import MegatronOptions
from mt_import.result import ImportResult, Processes, result_of

KEY = "megatron"
"""Of a reader's metadata: what Megatron's files say, unchanged."""
FAMILIES: Mapping[str, str] = {"bert": "bert", "t5": "t5", "hybrid": "hybrid", "mamba": "hybrid"}
"""Family of the checkpoint's model -> the script that trains it, where it is not pretrain_gpt.py."""
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "encoder_num_layers": ("num_layers",),
    "encoder_seq_length": ("seq_length",),
    "start_weight_decay": ("weight_decay",),
    "end_weight_decay": ("weight_decay",),
    "eval_global_batch_size": ("global_batch_size",),
    "eval_micro_batch_size": ("micro_batch_size",),
    "padded_vocab_size": (),
    "tensor_parallel_num_weight_shards": (),
    "expert_tensor_parallel_num_weight_shards": (),
    "iterations_to_skip": (),
}
"""What Megatron's validation fills in -> the attributes that it equals then; without any: whatever they are."""


def import_checkpoint(path: Path, host: PluginHost, options: MegatronOptions) -> ImportResult:
    """path: what Megatron's --save named, or the folder of an iteration. Raises CheckpointError and ConfigError."""
    metadata = open_checkpoint(find_checkpoint(path), host).metadata
    if KEY not in metadata:
        raise ConfigError(f"{path} is no checkpoint of Megatron's, so that it has no arguments of its")
    stored = metadata[KEY]["args"]
    family = metadata["config"]["model"]["family"]
    entry = entry_script(options.entry or FAMILIES.get(family, "gpt"))
    given = {dest: given for dest, value in stored.items() if (given := _given(dest, value, stored)) is not None}
    translation = translate(given, entry, host, source=str(path), version=options.version or "main")
    processes = Processes(options.world_size or stored.get("world_size"))
    return result_of(translation, f"{path} with {len(given)} arguments that are no defaults", processes)


def _given(dest: str, value: Any, stored: Mapping[str, Any]) -> Given | None:
    """An attribute as the argument that was given for it; None for defaults and what validation filled in."""
    argument = by_dest().get(dest)
    value = _plain(value)
    if argument is None or value is None or _is_object(value) or _follows(dest, value, stored):
        return None
    # None, False, 0 and "" are the same for an option that is off.
    if not value and not argument.default:
        return None
    if argument.count and not isinstance(value, list):
        value = [value]
    return None if value == argument.default else Given(argument, argument.spelled, value)


def _follows(dest: str, value: Any, stored: Mapping[str, Any]) -> bool:
    return dest in FOLLOWS and all(stored.get(other) == value for other in FOLLOWS[dest])


def _is_object(value: Any) -> bool:
    # The representation of an object that the restricted reader did not build.
    return isinstance(value, str) and value.startswith("<")


def _plain(value: Any) -> Any:
    """Dtypes by Megatron's words."""
    words = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    return words.get(value, value) if isinstance(value, str) else value
