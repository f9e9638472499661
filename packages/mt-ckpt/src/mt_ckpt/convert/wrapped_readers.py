"""Checkpoints with other rows of the vocabulary, without FP8 histories, or with another tokenizer than their files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mt_ckpt.hugging_face.tokenizer import FILES, GENERATION, read_tokenizer_files, tokenizer_config
from mt_ckpt.megatron.vocabulary_padding import PADDING
from mt_ckpt.model import expected_parameters, model_config
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import config_from_dict
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost
from mt_core.train.build import restore_tokenizer

TRIM = "--trim-vocabulary"
TRUE_SIZE = "--true-vocab-size"


class _Wrapped:
    """A `CheckpointReader` that is another one where a subclass does not differ."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._reader.metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._reader.shapes()

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._reader.dtypes()

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)

    def files(self) -> Mapping[str, bytes]:
        return self._reader.files()


# -- without rows of padding ------------------------------------------------------------------------


def padded_tables(
    reader: CheckpointReader, shapes: Mapping[str, tuple[int, ...]], vocab_size: int | None
) -> dict[str, int]:
    """Parameter -> rows in the checkpoint, of those whose rows are the vocabulary's and that have more of them.

    shapes: of the model's parameters. vocab_size: of its configuration, None for a model without a vocabulary.
    """
    stored = reader.shapes()
    stored_shapes = {name: tuple(stored[MODEL + name]) for name in shapes if MODEL + name in stored}
    return {
        name: shape[0]
        for name, shape in stored_shapes.items()
        if vocab_size is not None
        and shapes[name][:1] == (vocab_size,)
        and shape[1:] == shapes[name][1:]
        and shape[:1] > (vocab_size,)
    }


def without_padding(
    reader: CheckpointReader, shapes: Mapping[str, tuple[int, ...]], vocab_size: int | None, *, trim: bool
) -> CheckpointReader:
    """The checkpoint as its configuration says it is. trim: rows beyond the vocabulary may be dropped.

    Raises CheckpointError, which says what can be done, when there are such rows and trim was not requested, and
    ConfigError when it was and there are none.
    """
    tables = padded_tables(reader, shapes, vocab_size)
    if trim and not tables:
        raise ConfigError(f"{TRIM}: no table has more than the model's vocab_size={vocab_size} rows; leave it out")
    if not tables:
        return reader
    assert vocab_size is not None
    if not trim:
        name, rows = next(iter(tables.items()))
        raise CheckpointError(
            f"{name} has {rows} rows, but the configuration says vocab_size={vocab_size}; if the others are padding, "
            f"{TRIM} drops them; if they are words, set vocab_size to {rows} in the checkpoint's configuration"
        )
    return _Trimmed(reader, tables, vocab_size)


class _Trimmed(_Wrapped):
    """A `CheckpointReader` without rows beyond the vocabulary, in the model and its optimizer."""

    def __init__(self, reader: CheckpointReader, tables: Mapping[str, int], vocab_size: int) -> None:
        super().__init__(reader)
        self._vocab_size = vocab_size
        self._cut = {
            name
            for name, shape in reader.shapes().items()
            # Suffixes: the optimizer's state ends with the parameter's name.
            if any(name.endswith(f".{table}") and shape[:1] == (rows,) for table, rows in tables.items())
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: (self._vocab_size, *shape[1:]) if name in self._cut else tuple(shape)
            for name, shape in self._reader.shapes().items()
        }

    def read(self, name: str) -> Tensor:
        tensor = self._reader.read(name)
        # A view: the rows that are cut off stay in memory until it is dropped.
        return tensor[: self._vocab_size] if name in self._cut else tensor


# -- another number of ids --------------------------------------------------------------------------


def with_vocab_size(reader: CheckpointReader, vocab_size: int, host: PluginHost) -> CheckpointReader:
    """The checkpoint as one of a model with so many ids: the rows beyond them are its padding, and the other way round.

    Raises ConfigError for more rows than there are, and for a model without a vocabulary.
    """
    model = model_config(reader, host).model
    old = getattr(model, "vocab_size", None)
    if old is None:
        raise ConfigError(f"{TRUE_SIZE} {vocab_size}: model.family={model.family} has no vocabulary; leave it out")
    recounted = _Recounted(reader, vocab_size, vocabulary_tables(reader, host))
    rows = old + recounted.num_padding_rows
    if not 0 < vocab_size <= rows:
        raise ConfigError(f"{TRUE_SIZE} {vocab_size}: the checkpoint has {rows} rows; it can be 1 to {rows}")
    return recounted


def vocabulary_tables(reader: CheckpointReader, host: PluginHost) -> list[str]:
    """Parameters that have a row for each id: those whose shape follows the size of the vocabulary."""
    model = dict(reader.metadata["config"]["model"])
    # The model itself says it: what changes with one id more has a row for each. Shapes only, on the meta device.
    first, second = (
        expected_parameters(config_from_dict({"model": {**model, "vocab_size": size}}, host), host)
        for size in (model["vocab_size"], model["vocab_size"] + 1)
    )
    return [name for name in first if first[name].shape != second[name].shape]


def num_padding_rows(reader: CheckpointReader) -> int:
    """Rows beside the vocabulary's, of a checkpoint that keeps them."""
    return max((shape[0] for name, shape in reader.shapes().items() if name.startswith(PADDING + MODEL)), default=0)


def _with_setting(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    config = metadata["config"]
    return {**metadata, "config": {**config, "model": {**config["model"], "vocab_size": vocab_size}}}


class _Recounted(_Wrapped):
    """A `CheckpointReader` with another boundary between vocabulary and padding."""

    def __init__(self, reader: CheckpointReader, vocab_size: int, tables: Collection[str]) -> None:
        super().__init__(reader)
        self._vocab_size = vocab_size
        self.num_padding_rows = num_padding_rows(reader)
        stored = reader.shapes()
        self._rows = {
            name: shape[0] + stored.get(PADDING + name, (0,))[0]
            for name, shape in stored.items()
            if len(shape) and not name.startswith(PADDING) and any(name.endswith(f".{table}") for table in tables)
        }
        """Table, or a state of it -> all of its rows."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        return _with_setting(self._reader.metadata, self._vocab_size)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = {name: tuple(shape) for name, shape in self._reader.shapes().items() if not name.startswith(PADDING)}
        for name, rows in self._rows.items():
            below = shapes[name][1:]
            shapes[name] = (self._vocab_size, *below)
            if rows > self._vocab_size:
                shapes[PADDING + name] = (rows - self._vocab_size, *below)
        return shapes

    def dtypes(self) -> Mapping[str, torch.dtype]:
        dtypes = self._reader.dtypes()
        return {name: dtypes[name.removeprefix(PADDING)] for name in self.shapes()}

    def read(self, name: str) -> Tensor:
        table = name.removeprefix(PADDING)
        if table not in self._rows:
            return self._reader.read(name)
        # Table and padding are joined and cut again at the new boundary.
        parts = [self._reader.read(part) for part in (table, PADDING + table) if part in self._reader.shapes()]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole[: self._vocab_size] if name == table else whole[self._vocab_size :]


# -- without the amax histories of delayed FP8 scaling -------------------------------------------------
# They are stored among the parameters and determine a run's next scales; the model is the same without them.

HISTORY = ".fp8.amax_history"
"""Suffix of the name of a linear layer's history."""
Value = TypeVar("Value")


def histories_of(reader: CheckpointReader) -> list[str]:
    return [name for name in reader.shapes() if name.endswith(HISTORY)]


def without_histories(reader: CheckpointReader) -> CheckpointReader:
    """The checkpoint without histories."""
    return _WithoutHistories(reader) if histories_of(reader) else reader


class _WithoutHistories(_Wrapped):
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return _kept(self._reader.shapes())

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return _kept(self._reader.dtypes())


def _kept(entries: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in entries.items() if not name.endswith(HISTORY)}


# -- another tokenizer: `mt convert --tokenizer` -----------------------------------------------------

TOKENIZER = "--tokenizer"


def with_tokenizer(reader: CheckpointReader, path: Path, vocab_size: int | None, host: PluginHost) -> CheckpointReader:
    """`reader` with the tokenizer whose files are in the folder `path`, instead of its tokenizer.

    vocab_size: of the model. Raises ConfigError for a folder without a tokenizer, and for one that has more ids than
    the model.
    """
    files = read_tokenizer_files(path, {})
    if not set(files) - {GENERATION}:
        raise ConfigError(
            f"{TOKENIZER} {path}: there is no tokenizer; a folder with one of these is needed: {listed()}"
        )
    chosen = tokenizer_config(path, files, vocab_size)
    config = config_from_dict({"model": reader.metadata["config"]["model"], "tokenizer": chosen}, host)
    # The tokenizer is built, so that broken files are found before anything is written.
    size = restore_tokenizer(config, files, host).vocab_size
    if vocab_size is not None and size > vocab_size:
        raise ConfigError(
            f"{TOKENIZER} {path}: this tokenizer has {size} ids, but the model's vocab_size is {vocab_size}"
        )
    return _WithTokenizer(reader, chosen, files)


def listed() -> str:
    return ", ".join(name for name in FILES if name.startswith(("tokenizer.", "vocab.", "spiece.")))


class _WithTokenizer(_Wrapped):
    def __init__(self, reader: CheckpointReader, chosen: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        super().__init__(reader)
        self._chosen, self._files = dict(chosen), files

    @property
    def metadata(self) -> Mapping[str, Any]:
        stored = self._reader.metadata
        return {**stored, "config": {**stored["config"], "tokenizer": self._chosen}}

    def files(self) -> Mapping[str, bytes]:
        return self._files
