"""From a record to ids, by the rules of Megatron's script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from pydantic import ValidationError

from mt_core.config.messages import validation_message
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_core.plugins import load_plugins
from mt_core.specs import TOKENIZERS
from mt_data.preprocess.readers import json_kind
from mt_data.preprocess.sentences import SplitSentences


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer by its registered name, and its options as JSON text, so that this can be a key."""

    tokenizer_type: str
    options: str

    @classmethod
    def of(cls, tokenizer_type: str, options: Mapping[str, Any]) -> TokenizerChoice:
        # sort_keys: equal options give equal objects, on which encoder_of's cache depends.
        return cls(tokenizer_type, json.dumps(dict(options), sort_keys=True))

    def config(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.options))

    def build(self) -> Tokenizer:
        """Raises PluginError for an unknown name, ConfigError for wrong options, DataError for wrong files."""
        spec = load_plugins()[TOKENIZERS].get(self.tokenizer_type, key="--tokenizer-type")
        config_type = spec.config_type.load()
        options = self.config()
        try:
            config = config_type(tokenizer_type=self.tokenizer_type, **options)
        except ValidationError as error:
            missing = [str(entry["loc"][0]) for entry in error.errors() if entry["type"] == "missing"]
            if missing:
                wanted = ", ".join(f"--tokenizer {key}=..." for key in missing)
                raise ConfigError(f"{self.tokenizer_type} needs {' and '.join(missing)}; give {wanted}") from None
            origins = dict.fromkeys(options, "the tokenizer's options")
            raise ConfigError(validation_message("tokenizer", config_type, error, origins)) from None
        return spec.build.load()(config)


@dataclass(frozen=True, eq=False)
class GivenTokenizer:
    """A tokenizer that has been built already; other processes get a copy of it."""

    tokenizer: Tokenizer

    def build(self) -> Tokenizer:
        return self.tokenizer


class Encoded(NamedTuple):
    """A document: ids in pieces, one after another, and the lengths of its sequences, none of them 0.

    There may be more pieces than sequences: the end-of-document id is a piece of its own, in the last sequence.
    """

    pieces: list[np.ndarray]
    lengths: list[int]


class DocumentEncoder:
    """Encodes chosen fields of records. `split` is None where a text is one sequence."""

    def __init__(
        self, tokenizer: Tokenizer, json_keys: tuple[str, ...], append_eod: bool, split: SplitSentences | None
    ) -> None:
        self.json_keys = json_keys
        self.vocab_size = tokenizer.vocab_size
        encode = getattr(tokenizer, "encode_array", None)
        # encode_array is optional: it gives the ids as an array without a list of Python integers in between.
        self._encode = encode or (lambda text: np.array(tokenizer.encode(text), np.int64))
        self._split = split
        self._eod = np.array([_eod(tokenizer)], np.uint32) if append_eod else None

    def encode(self, record: Mapping[str, Any]) -> list[Encoded]:
        """One document for each key. Raises ValueError with the reason when the record cannot be used."""
        return [self._encode_field(key, record) for key in self.json_keys]

    def _encode_field(self, key: str, record: Mapping[str, Any]) -> Encoded:
        text = record.get(key)
        try:
            # Exact types: JSON has no subclasses of str or list, and `type(...) is` costs less than isinstance per
            # record.
            if type(text) is str:
                if self._split is None:
                    pieces = [self._encode(text)]
                else:
                    pieces = [self._encode(sentence) for sentence in self._split(text)]
            elif type(text) is list and all(type(sentence) is str for sentence in text):
                pieces = [self._encode(sentence) for sentence in text]  # its author has split it
            else:
                raise ValueError(_no_text(key, record))
        except DataError as error:
            raise ValueError(f"{key}: the tokenizer refuses the text: {error}") from error
        return self._document(pieces)

    def _document(self, pieces: list[np.ndarray]) -> Encoded:
        """Sentences without ids are left out; the end-of-document id belongs to the last sentence."""
        lengths = [len(piece) for piece in pieces]
        # Megatron-LM: preprocess_data.py drops sentences without ids and appends the end-of-document id to the last one
        # that is left. A document without any keeps its boundary but has no sequence, hence no end-of-document id
        # either.
        if not all(lengths):
            pieces = [piece for piece in pieces if len(piece)]
            lengths = [length for length in lengths if length]
        if pieces and self._eod is not None:
            pieces.append(self._eod)
            lengths[-1] += 1
        return Encoded(pieces, lengths)


def _eod(tokenizer: Tokenizer) -> int:
    if tokenizer.special.eod is None:
        raise ConfigError("--append-eod: this tokenizer has no end-of-document id; leave the option out")
    return tokenizer.special.eod


def _no_text(key: str, record: Mapping[str, Any]) -> str:
    if key not in record:
        keys = ", ".join(list(record)[:20]) or "none"
        return f'has no key "{key}" (its keys: {keys}); --json-keys (data.json_key) names what to read'
    value = record[key]
    what = "a list with other things than text" if type(value) is list else json_kind(value)
    return f'"{key}" is {what}, not text or a list of texts'
