"""Tables with rows beyond the vocabulary, as programs leave them that pad for their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.convert.source import MODEL
from mt_core.errors import CheckpointError, ConfigError
from mt_core.specs import CheckpointReader

FLAG = "--trim-vocabulary"


def padded_tables(
    reader: CheckpointReader, shapes: Mapping[str, tuple[int, ...]], vocab_size: int | None
) -> dict[str, int]:
    """Parameter -> rows in the checkpoint, of those whose rows are the vocabulary's and that have more of them.

    shapes: of the model's parameters. vocab_size: of its configuration, None for a model that reads no words.
    """
    stored = reader.shapes()
    found = {name: tuple(stored[MODEL + name]) for name in shapes if MODEL + name in stored}
    return {
        name: shape[0]
        for name, shape in found.items()
        if vocab_size is not None
        and shapes[name][:1] == (vocab_size,)
        and shape[1:] == shapes[name][1:]
        and shape[:1] > (vocab_size,)
    }


def without_padding(
    reader: CheckpointReader, shapes: Mapping[str, tuple[int, ...]], vocab_size: int | None, *, trim: bool
) -> CheckpointReader:
    """The checkpoint as its configuration says it is. trim: rows beyond the vocabulary may be dropped.

    Raises CheckpointError, which says what can be done, when there are such rows and trim was not asked for, and
    ConfigError when it was and there are none.
    """
    tables = padded_tables(reader, shapes, vocab_size)
    if trim and not tables:
        raise ConfigError(f"{FLAG}: no table has more than the model's vocab_size={vocab_size} rows; leave it out")
    if not tables:
        return reader
    assert vocab_size is not None
    if not trim:
        name, rows = next(iter(tables.items()))
        raise CheckpointError(
            f"{name} has {rows} rows, but the configuration says vocab_size={vocab_size}; if the others are padding, "
            f"{FLAG} drops them; if they are words, set vocab_size to {rows} in the checkpoint's configuration"
        )
    return _Trimmed(reader, tables, vocab_size)


class _Trimmed:
    """A `mt_core.specs.CheckpointReader` without rows beyond the vocabulary, in the model and its optimizer."""

    def __init__(self, reader: CheckpointReader, tables: Mapping[str, int], vocab_size: int) -> None:
        self._reader, self._vocab_size = reader, vocab_size
        self._cut = {
            name
            for name, shape in reader.shapes().items()
            if any(name.endswith(f".{table}") and shape[:1] == (rows,) for table, rows in tables.items())
        }

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._reader.metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: (self._vocab_size, *shape[1:]) if name in self._cut else tuple(shape)
            for name, shape in self._reader.shapes().items()
        }

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._reader.dtypes()

    def read(self, name: str) -> Tensor:
        tensor = self._reader.read(name)
        return tensor[: self._vocab_size] if name in self._cut else tensor

    def files(self) -> Mapping[str, bytes]:
        return self._reader.files()
