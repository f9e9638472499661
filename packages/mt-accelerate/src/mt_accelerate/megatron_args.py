"""`MegatronLMPlugin(other_megatron_args=...)`: Megatron's arguments as keys, by the table of `mt import`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_accelerate.megatron_lm_plugin import Sections
from mt_core.errors import ConfigError, Problems, did_you_mean
from mt_import.megatron_arguments.entry_scripts import BERT_TOKENIZER, GPT_TOKENIZER
from mt_import.megatron_arguments.table import REASONS, Argument, by_dest
from mt_import.readers.accelerate import KEYS

EXPLICIT: Mapping[str, str] = {"exp_avg_dtype": "optimizer.exp_avg_dtype"}
"""Arguments that other fields of the plugin make a key of."""
FIELDS = {key: field for field, key in KEYS.items()}
"""Key -> the field of the plugin that sets it."""
TOKENIZERS = {"bert": BERT_TOKENIZER, "t5": BERT_TOKENIZER}
"""Model family -> the tokenizer that Megatron takes unless tokenizer_type is given; others take that of GPT."""


def other_sections(arguments: Mapping[str, Any], family: str) -> Sections:
    """arguments: attribute of Megatron's namespace -> value. Raises one ConfigError that names each argument which
    Megatron does not have, which the model or a field of the plugin decides, or which has no effect here."""
    found: Sections = {}
    problems = Problems()
    for dest, value in arguments.items():
        with problems.collect():
            section, _, key = _key_of(dest).partition(".")
            found.setdefault(section, {})[key] = value
    problems.stop_if_any()
    if "tokenizer" in found:
        # Some argument of the tokenizer is given: its type is then Megatron's default for the script, as there.
        found["tokenizer"] = {"tokenizer_type": TOKENIZERS.get(family, GPT_TOKENIZER), **found["tokenizer"]}
    return found


def _key_of(dest: str) -> str:
    if dest in EXPLICIT:
        return EXPLICIT[dest]
    argument = by_dest().get(dest)
    if argument is None:
        raise ConfigError(f"other_megatron_args: Megatron has no {dest}{did_you_mean(dest, by_dest())}")
    # Only arguments that are one key with the same value: others need the whole launch script, which `mt import` reads.
    if argument.outcome != "copy" or len(argument.keys) != 1 or argument.keys[0].startswith("model."):
        raise ConfigError(f"other_megatron_args: {dest} cannot be given: {_reason(argument)}; leave it out")
    if (field := FIELDS.get(argument.keys[0])) is not None:
        raise ConfigError(f"other_megatron_args: {dest} is a field of the plugin; give MegatronLMPlugin({field}=...)")
    return argument.keys[0]


def _reason(argument: Argument) -> str:
    if argument.outcome == "refused":
        return argument.reason
    if argument.outcome == "none":
        return f"it has no effect here ({REASONS[argument.reason]})"
    if any(key.startswith("model.") for key in argument.keys):
        return "the transformers model decides it"
    return f"the plugin, the optimizer or the scheduler decides {', '.join(argument.keys)}"
