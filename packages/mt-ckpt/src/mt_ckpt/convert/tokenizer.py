"""A checkpoint with its tokenizer replaced: `mt convert --tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.hugging_face.tokenizer import FILES, GENERATION, read_tokenizer_files, tokenizer_config
from mt_core.config.loading import config_from_dict
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_core.specs import CheckpointReader
from mt_core.train.build import restore_tokenizer

FLAG = "--tokenizer"


def with_tokenizer(reader: CheckpointReader, path: Path, vocab_size: int | None, host: PluginHost) -> CheckpointReader:
    """`reader` with the tokenizer whose files are in the folder `path`, instead of its tokenizer.

    vocab_size: of the model. Raises ConfigError for a folder without a tokenizer, and for one that has more ids than
    the model.
    """
    files = read_tokenizer_files(path, {})
    if not set(files) - {GENERATION}:
        raise ConfigError(f"{FLAG} {path}: there is no tokenizer; a folder with one of these is needed: {listed()}")
    chosen = tokenizer_config(path, files, vocab_size)
    config = config_from_dict({"model": reader.metadata["config"]["model"], "tokenizer": chosen}, host)
    # The tokenizer is built, so that broken files are found before anything is written.
    size = restore_tokenizer(config, files, host).vocab_size
    if vocab_size is not None and size > vocab_size:
        raise ConfigError(f"{FLAG} {path}: this tokenizer has {size} ids, but the model's vocab_size is {vocab_size}")
    return _WithTokenizer(reader, chosen, files)


def listed() -> str:
    return ", ".join(name for name in FILES if name.startswith(("tokenizer.", "vocab.", "spiece.")))


class _WithTokenizer:
    """A `mt_core.specs.CheckpointReader`."""

    def __init__(self, reader: CheckpointReader, chosen: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        self._reader, self._files = reader, files
        config = {**reader.metadata["config"], "tokenizer": dict(chosen)}
        self.metadata: Mapping[str, Any] = {**reader.metadata, "config": config}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._reader.shapes()

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._reader.dtypes()

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)

    def files(self) -> Mapping[str, bytes]:
        return self._files
