"""A checkpoint that is a difference: it holds what was trained, and names the checkpoint that has the rest.

`checkpoint.save_frozen = false` writes such checkpoints. The entry `base` of their metadata:

    path      of the base, as it was opened
    tensors   canonical name (`model.NAME`) -> [dtype, shape, hash] of each tensor that is in the base alone

The hash is of the whole tensor's values, so that a base may be resharded or converted and still is the same one. Where
the base is not at its path it is looked for beside the checkpoint, under the name `base` (a link, for instance).

Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_core.checkpoint_specs import CheckpointReader, ReadsSlices
from mt_core.errors import CheckpointError
from mt_core.paths import as_path
from mt_core.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor, dtype

BASE = "base"
"""Entry of the metadata, and the name under which a base that was moved is found beside its checkpoints."""
PATH, TENSORS = "path", "tensors"


class OverBase:
    """A difference and its base as the whole checkpoint (a `CheckpointReader`). Both are read from as they are needed;
    what comes from the base is read whole and compared with the hash in the difference."""

    def __init__(self, path: Path, difference: CheckpointReader, base: CheckpointReader, base_path: Path) -> None:
        """Raises CheckpointError for a base that lacks a tensor, or has another shape or dtype of one."""
        self.path, self.difference, self.base, self.base_path = path, difference, base, base_path
        self._stored: Mapping[str, Sequence[Any]] = difference.metadata[BASE][TENSORS]
        shapes, dtypes = base.shapes(), base.dtypes()
        for name, (kind, shape, _) in self._stored.items():
            if name not in shapes:
                raise self._changed(f"it has no tensor {name}")
            if (dtype_name(dtypes[name]), list(shapes[name])) != (kind, list(shape)):
                raise self._changed(
                    f"{name} is {dtype_name(dtypes[name])} {list(shapes[name])}, not {kind} {list(shape)}"
                )

    @property
    def metadata(self) -> Mapping[str, Any]:
        """That of the difference; what is written from this reader is whole, and names no base."""
        return {key: value for key, value in self.difference.metadata.items() if key != BASE}

    @property
    def entry(self) -> Mapping[str, Any]:
        """What the difference says of its base."""
        return dict(self.difference.metadata[BASE])

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        of_base = self.base.shapes()
        return {**{name: of_base[name] for name in self._stored}, **self.difference.shapes()}

    def dtypes(self) -> Mapping[str, dtype]:
        of_base = self.base.dtypes()
        return {**{name: of_base[name] for name in self._stored}, **self.difference.dtypes()}

    def files(self) -> Mapping[str, bytes]:
        return self.difference.files()

    def read(self, name: str) -> Tensor:
        """Raises CheckpointError for a tensor of the base that is another one than when the difference was written."""
        if name not in self._stored:
            return self.difference.read(name)
        tensor = self.base.read(name)
        if tensor_hash(tensor) != self._stored[name][2]:
            raise self._changed(f"{name} has other values")
        return tensor

    def read_slices(self, name: str, slices: Sequence[TensorSlice]) -> list[Tensor]:
        """Parts of a tensor; one of the base is read whole, as its hash is that of all its values."""
        if name not in self._stored and isinstance(self.difference, ReadsSlices):
            return self.difference.read_slices(name, slices)
        whole = self.read(name)
        return [whole[part.slices].contiguous() for part in slices]

    def changed_tensors(self) -> list[str]:
        """What is different in the base, tensor by tensor; reads all of it."""
        return [name for name in self._stored if tensor_hash(self.base.read(name)) != self._stored[name][2]]

    def _changed(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} holds the trained parameters alone, and its base {self.base_path} is not the checkpoint "
            f"that it was written over: {what}; put that one back, or under {self.path.parent / BASE}"
        )


def with_base(path: Path, reader: CheckpointReader, open_base: Callable[[Path], CheckpointReader]) -> CheckpointReader:
    """The whole checkpoint, where `reader` is of a difference; else the reader itself.

    Raises CheckpointError where the base is missing or another one.
    """
    entry = reader.metadata.get(BASE)
    if entry is None:
        return reader
    named, beside = as_path(entry[PATH]), path.parent / BASE
    place = named if named.is_dir() or named.is_file() else beside
    if not (place.is_dir() or place.is_file()):
        raise CheckpointError(
            f"{path} holds the trained parameters alone; its base {named} is missing: put it back, or under {beside}"
        )
    base = open_base(place)
    if isinstance(base, OverBase):
        raise CheckpointError(f"{place}: the base of {path} needs a base itself")
    return OverBase(path, reader, base, place)


def base_entry(path: str, tensors: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The entry `base` of the metadata."""
    return {PATH: path, TENSORS: dict(tensors)}


def described(reader: CheckpointReader, names: Sequence[str]) -> dict[str, list[Any]]:
    """Name -> [dtype, shape, hash] of tensors, which are read one after another."""
    descriptions: dict[str, list[Any]] = {}
    for name in names:
        tensor = reader.read(name)
        descriptions[name] = [dtype_name(tensor.dtype), list(tensor.shape), tensor_hash(tensor)]
    return descriptions


def dtype_name(kind: dtype) -> str:
    return str(kind).removeprefix("torch.")


def tensor_hash(tensor: Tensor) -> str:
    """BLAKE2b of the values, in row-major order, of 16 bytes."""
    import torch

    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=16).hexdigest()
