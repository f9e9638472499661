"""Several checkpoints of one model read as one: the mean of their weights (Izmailov et al., 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.errors import CheckpointError


class Average:
    """A `CheckpointReader` of the weights alone; metadata and files are those of the last checkpoint.

    Sums are in fp32 (fp64 for fp64). What is no floating-point number has to be the same everywhere.
    """

    def __init__(self, readers: Sequence[CheckpointReader], names: Sequence[str]) -> None:
        """names: of the checkpoints, for messages. Raises CheckpointError unless all hold the same model."""
        self._readers, self._names = readers, names
        self._shapes = _weights(readers[-1])
        for reader, name in zip(readers[:-1], names[:-1], strict=True):
            _require_same(name, _weights(reader), names[-1], self._shapes)
        self.left_out = [name for name in readers[-1].shapes() if name not in self._shapes]
        """Tensors of the last checkpoint that are no weights, such as its optimizer's state."""
        self.metadata: Mapping[str, Any] = {**readers[-1].metadata, "average_of": list(names)}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: dtype for name, dtype in self._readers[-1].dtypes().items() if name in self._shapes}

    def files(self) -> Mapping[str, bytes]:
        return self._readers[-1].files()

    def read(self, name: str) -> Tensor:
        first, *others = self._readers
        tensor = first.read(name)
        if not tensor.is_floating_point():
            self._require_equal(name, tensor)
            return tensor
        # copy=True: `tensor` may be the pages of a mapped file, or a tensor that the reader keeps. fp32: a sum of bf16
        # values rounds away what the later checkpoints add.
        total = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        for reader in others:
            total += reader.read(name)
        return (total / len(self._readers)).to(self.dtypes()[name])

    def _require_equal(self, name: str, tensor: Tensor) -> None:
        for reader, checkpoint in zip(self._readers, self._names, strict=True):
            if not torch.equal(tensor, reader.read(name)):
                raise CheckpointError(f"{checkpoint}: {name} holds other whole numbers than in {self._names[0]}")


def _weights(reader: CheckpointReader) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in reader.shapes().items() if name.startswith(MODEL)}


def _require_same(
    first: str, shapes: Mapping[str, tuple[int, ...]], second: str, others: Mapping[str, tuple[int, ...]]
) -> None:
    different = [name for name in {**shapes, **others} if shapes.get(name) != others.get(name)]
    if different:
        raise CheckpointError(
            f"{first} and {second} are not of one model: {', '.join(different[:5])} differ in shape or are not in both"
        )
