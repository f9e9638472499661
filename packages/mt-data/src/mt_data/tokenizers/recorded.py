"""The tokenizer that a data set's manifest records."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from mt_core.config.messages import validation_message
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_core.plugins import load_plugins
from mt_core.specs import TOKENIZERS


def recorded_tokenizer(
    recorded: Mapping[str, Any], tokenizer_type: str | None = None, entries: Mapping[str, Any] = MappingProxyType({})
) -> Tokenizer:
    """The recorded tokenizer, its configuration completed by `entries`; or `tokenizer_type`, configured by them alone.

    Raises ConfigError for keys or values that cannot be, PluginError for an unknown type, DataError for a tokenizer
    that is not the recorded one.
    """
    built = _built(recorded if tokenizer_type is None else {}, tokenizer_type, entries)
    _require_recorded(recorded, built)
    return built


def _built(recorded: Mapping[str, Any], tokenizer_type: str | None, entries: Mapping[str, Any]) -> Tokenizer:
    name = tokenizer_type or recorded.get("tokenizer_type")
    if name is None:
        raise ConfigError("the tokenizer's keys were given without --tokenizer-type, and the data set records none")
    spec = load_plugins()[TOKENIZERS].get(name, key="--tokenizer-type" if tokenizer_type else "tokenizer_type")
    config_type: Any = spec.config_type.load()
    settings = {**recorded.get("config", {}), "tokenizer_type": name}
    origins = dict.fromkeys(settings, "the manifest") | dict.fromkeys(entries, "the command line")
    try:
        # Entries override the recorded paths, where the files have moved since.
        config = config_type.model_validate({**settings, **entries})
    except ValidationError as error:
        raise ConfigError(validation_message("tokenizer", config_type, error, origins)) from error
    return spec.build.load()(config)


def _require_recorded(recorded: Mapping[str, Any], built: Tokenizer) -> None:
    fingerprint = recorded.get("fingerprint")
    if fingerprint is not None and fingerprint != built.fingerprint():
        raise DataError(
            f"the data set was made with {recorded.get('tokenizer_type')} of fingerprint {fingerprint}, and this "
            f"tokenizer has {built.fingerprint()}; give the files it was made with"
        )


def tokenizer_entries(texts: Sequence[str]) -> dict[str, Any]:
    """Keys of the tokenizer's section from KEY=VALUE: a TOML value, else text. Raises ConfigError for another form."""
    entries: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--tokenizer {text!r} must read KEY=VALUE, for example vocab_file=vocab.json")
        try:
            entries[key] = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            entries[key] = value
    return entries
