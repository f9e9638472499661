"""The model that a config.json of Hugging Face describes, without weights. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_core.errors import ConfigError

if TYPE_CHECKING:
    from mt_core.plugins import PluginHost

CONFIG = "config.json"
FORMAT = "hf"


def read_hf_config(path: Path) -> dict[str, Any]:
    """path: config.json, or the folder that holds it. Raises ConfigError when that is no JSON object with a
    model_type."""
    file = path / CONFIG if path.is_dir() else path
    try:
        external = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as the config.json of a model: {error}") from None
    if not isinstance(external, dict) or "model_type" not in external:
        raise ConfigError(f"{file} has no model_type; give the config.json of a Hugging Face model, or its folder")
    return external


def tokenizer_section(external: Mapping[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """The keys of [tokenizer] for a program that gives ids itself: their number, and the end of a document."""
    tokenizer: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size}
    eod = external.get("eos_token_id")
    # Some configurations have a list of ids, or one that is not in the vocabulary.
    if isinstance(eod, int) and vocab_size is not None and 0 <= eod < vocab_size:
        tokenizer["null_tokenizer_eod_id"] = eod
    return tokenizer


def model_section(external: Mapping[str, Any], host: PluginHost) -> dict[str, Any]:
    """The keys of [model] that a config.json says. Of several families that know its model_type (a base model, the same
    with a head) that which has its architecture.

    Raises ConfigError for a type that no family has, and for what the family cannot express.
    """
    kind, listed = external["model_type"], external.get("architectures") or [None]
    families = [spec.name_maps[FORMAT].load() for spec in host.models if FORMAT in spec.name_maps]
    able = [family for family in families if kind in family.model_types]
    if not able:
        known = ", ".join(sorted({name for family in families for name in family.model_types})) or "none"
        raise ConfigError(f"model_type={kind!r} is of no installed model family; known are {known}")
    # "architectures" names the class that was saved, such as one with a classification head. A file without it is that
    # of the first family.
    family = next((family for family in able if listed[0] in family.architectures.values()), able[0])
    return dict(family.read_config(external))
