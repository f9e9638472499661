"""Options of a conversion that a format cannot express are refused, not ignored."""

from __future__ import annotations

from mt_core.errors import ConfigError
from mt_core.specs import ConvertOptions

LAYOUT = {
    "target_tensor_parallel_size": 1,
    "target_pipeline_parallel_size": 1,
    "target_virtual_pipeline_parallel_size": 1,
    "target_expert_parallel_size": 1,
    "target_expert_tensor_parallel_size": None,
    "make_vocab_size_divisible_by": None,
}
"""Options that say how tensors are cut and padded, and the value that asks for nothing."""


def refuse_layout(saver: str, options: ConvertOptions) -> None:
    """Raises ConfigError if the options ask for tensors that are cut or padded."""
    refuse(saver, options, *LAYOUT, why="it holds whole tensors without padding")


def refuse(saver: str, options: ConvertOptions, *names: str, why: str) -> None:
    """Raises ConfigError if one of the named options is set."""
    for name in names:
        value = getattr(options, name)
        if value != LAYOUT.get(name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {value} means nothing to the format {saver}: {why}; leave it out")
