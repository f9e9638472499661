"""Options of a conversion that a format cannot express are refused, not ignored."""

from __future__ import annotations

from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import ConfigError

LAYOUT = {
    "target_tensor_parallel_size": 1,
    "target_pipeline_parallel_size": 1,
    "target_virtual_pipeline_parallel_size": 1,
    "target_expert_parallel_size": 1,
    "target_expert_tensor_parallel_size": None,
    "make_vocab_size_divisible_by": None,
    "vocab_padding": None,
}
"""Options for the sharding and padding of tensors, and their values without effect."""
MEGATRON = ("target_megatron_version", "target_transformer_impl", "target_optimizer_format")
"""Options of Megatron-Core's formats."""
NOT_MEGATRON = "it is none of Megatron-Core's"


def refuse_layout(saver: str, options: ConvertOptions) -> None:
    """Raises ConfigError if the options ask for sharded or padded tensors."""
    refuse(saver, options, *LAYOUT, why="it holds whole tensors without padding")
    refuse_megatron(saver, options, NOT_MEGATRON)


def refuse_megatron(saver: str, options: ConvertOptions, why: str) -> None:
    """Raises ConfigError for options that only Megatron-Core's formats have."""
    refuse(saver, options, *MEGATRON, why=why)


def refuse(saver: str, options: ConvertOptions, *names: str, why: str) -> None:
    """Raises ConfigError if one of the named options is set."""
    for name in names:
        value = getattr(options, name)
        # Options of Megatron are None when they are not given, as LAYOUT.get returns for them.
        if value != LAYOUT.get(name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {value} means nothing to the format {saver}: {why}; leave it out")


QUANTIZING = ("hf", "gguf", "trtllm")
"""Formats with schemes for --quantize."""


def refuse_scheme(saver: str, options: ConvertOptions, *, verify: bool = False) -> None:
    """Raises ConfigError for --quantize with a format that has no schemes, and with a comparison bit for bit."""
    if options.quantize is None:
        return
    if saver not in QUANTIZING:
        raise ConfigError(
            f"--quantize {options.quantize}: the format {saver} has no schemes of quantization here; "
            f"{', '.join(QUANTIZING)} have"
        )
    if verify:
        raise ConfigError(
            f"--quantize {options.quantize}: --verify compares bit for bit, which a quantized result is not; leave it "
            "out, and compare by mt quantization DIR --original PATH"
        )
