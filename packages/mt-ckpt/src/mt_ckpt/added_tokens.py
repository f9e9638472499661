"""A model with further tokens: rows of the embeddings and of the output layer, and the tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.convert.wrapped_readers import vocabulary_tables
from mt_ckpt.model import model_config
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import config_from_dict
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_core.train.build import restore_tokenizer

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


class WithTokens:
    """A `CheckpointReader` of the weights alone, with rows for new tokens.

    A new row is the mean, in fp32, of the rows of the tokens that the tokenizer had: rows of the model beyond them
    stand for no token and do not count. They are used before rows are added.
    """

    def __init__(self, reader: CheckpointReader, tokens: Sequence[str], host: PluginHost) -> None:
        """Raises ConfigError for a tokenizer without tokenizer.json, and for tokens it has or that are repeated."""
        self._reader = reader
        size = getattr(model_config(reader, host).model, "vocab_size", None)
        if size is None:
            raise ConfigError("the checkpoint's model has no vocabulary; tokens can be added to language models")
        self._old, self.ids, self._files = _extended(reader, tokens, host)
        self.vocab_size = max(size, self._old + len(tokens))
        self._tables = {MODEL + name for name in vocabulary_tables(reader, host)}

    @property
    def metadata(self) -> Mapping[str, Any]:
        stored = self._reader.metadata
        config = stored["config"]
        return {**stored, "config": {**config, "model": {**config["model"], "vocab_size": self.vocab_size}}}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: (self.vocab_size, *shape[1:]) if name in self._tables else tuple(shape)
            for name, shape in self._reader.shapes().items()
            if name.startswith(MODEL)
        }

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: dtype for name, dtype in self._reader.dtypes().items() if name.startswith(MODEL)}

    def files(self) -> Mapping[str, bytes]:
        return self._files

    def read(self, name: str) -> Tensor:
        tensor = self._reader.read(name)
        if name not in self._tables:
            return tensor
        rows = tensor.new_empty((self.vocab_size, *tensor.shape[1:]))
        rows[: len(tensor)] = tensor
        rows[self._old : self._old + len(self.ids)] = tensor[: self._old].float().mean(0).to(tensor.dtype)
        return rows


def _extended(
    reader: CheckpointReader, tokens: Sequence[str], host: PluginHost
) -> tuple[int, dict[str, int], dict[str, bytes]]:
    """Ids that the tokenizer had, the new tokens with their ids, and the files with them."""
    from tokenizers import AddedToken, Tokenizer

    files = dict(reader.files())
    if TOKENIZER not in files:
        raise ConfigError(f"the checkpoint's tokenizer has no {TOKENIZER}, to which tokens can be added")
    tokenizer = Tokenizer.from_str(files[TOKENIZER].decode())
    known = [token for token in tokens if tokenizer.token_to_id(token) is not None]
    if known or len(set(tokens)) < len(tokens):
        what = f"the tokenizer has {known[0]} already" if known else "a token is named twice"
        raise ConfigError(f"--token: {what}; name new tokens, each once")
    stored = reader.metadata["config"]
    config = config_from_dict({"model": stored["model"], "tokenizer": stored["tokenizer"]}, host)
    old = restore_tokenizer(config, files, host).vocab_size
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    ids = {token: tokenizer.token_to_id(token) for token in tokens}
    expected = {token: old + number for number, token in enumerate(tokens)}
    if ids != expected:
        raise ConfigError(
            f"the tokenizer has {old} ids, and its new tokens get {list(ids.values())}: some of its ids have no token; "
            "add the tokens with the program that made it"
        )
    files[TOKENIZER] = tokenizer.to_str(pretty=True).encode()
    if TOKENIZER_CONFIG in files:
        files[TOKENIZER_CONFIG] = _with_decoder(files[TOKENIZER_CONFIG], expected)
    return old, expected, files


def _with_decoder(content: bytes, ids: Mapping[str, int]) -> bytes:
    """tokenizer_config.json with the tokens where it lists those that were added."""
    values = json.loads(content)
    if "added_tokens_decoder" in values:
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
        values["added_tokens_decoder"] |= {str(number): {"content": token, **flags} for token, number in ids.items()}
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
