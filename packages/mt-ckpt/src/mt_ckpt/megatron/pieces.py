"""The ranks' shards of parameters, read as canonical tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mt_ckpt.megatron.model import Grid
from mt_ckpt.pickles.torch_file import StoredTensor
from mt_core.errors import CheckpointError
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.context import AxisName


class Piece(Protocol):
    """A rank's part of a tensor, in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read(self) -> Tensor: ...


@dataclass(frozen=True)
class Stack:
    """Pieces of one shape on a new leading axis: a rank's experts."""

    parts: Sequence[Piece]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self) -> Tensor:
        # Filled in place: torch.stack would hold all experts twice. [experts of the rank, ...]
        stacked = torch.empty(self.shape, dtype=self.dtype)
        for target, part in zip(stacked, self.parts, strict=True):
            target.copy_(part.read())
        return stacked


@dataclass(frozen=True)
class FlatPart:
    """Elements [first, ...) of a flat buffer, as a tensor of `shape`."""

    buffer: StoredTensor
    first: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    def read(self) -> Tensor:
        return self.buffer.read_flat(self.first, math.prod(self.shape)).view(self.shape)


@dataclass(frozen=True)
class Number:
    """A scalar that the file holds once for many parameters."""

    value: float
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def read(self) -> Tensor:
        return torch.tensor(self.value, dtype=self.dtype)


@dataclass(frozen=True)
class Entry:
    """A piece in the file of the rank at `place`. name: canonical. expert: its number on the rank, if it is one's."""

    place: Mapping[AxisName, int]
    name: str
    expert: int | None
    piece: Piece


@dataclass(frozen=True)
class Held:
    """A rank's whole part of a parameter."""

    place: Mapping[AxisName, int]
    piece: Piece


@dataclass(frozen=True)
class Gathered:
    """A parameter (or a state of its shape) in pieces.

    layout: as Megatron stores it, the vocabulary padded. shape: canonical, at most as large.
    """

    layout: ParameterLayout
    grid: Grid
    pieces: Sequence[Piece]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    def read(self) -> Tensor:
        # The padding is cut after gathering: it is at the end of the whole table, on the last ranks.
        whole = self.layout.gather([piece.read() for piece in self.pieces], self.grid.context())
        return cropped(whole, self.shape)


@dataclass(frozen=True)
class RowsBeyond:
    """Rows of a table from `first` on: the padding of its vocabulary."""

    whole: Piece
    first: int

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *others = self.whole.shape
        return (rows - self.first, *others)

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def read(self) -> Tensor:
        return self.whole.read()[self.first :].contiguous()


def cropped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The first rows of a table whose padding is left out."""
    for dim, size in enumerate(shape):
        tensor = tensor.narrow(dim, 0, size)
    return tensor.contiguous()


def hold(entries: Iterable[Entry]) -> dict[str, list[Held]]:
    """Canonical name -> what each rank holds of it, a rank's experts stacked by their numbers.

    Raises CheckpointError when an expert is missing among a rank's.
    """
    held: dict[str, list[Held]] = {}
    # (name, rank) -> number -> entry: files list experts one by one, in any order.
    experts: dict[tuple[str, tuple[int, ...]], dict[int, Entry]] = {}
    for entry in entries:
        if entry.expert is None:
            held.setdefault(entry.name, []).append(Held(entry.place, entry.piece))
        else:
            experts.setdefault((entry.name, tuple(entry.place.values())), {})[entry.expert] = entry
    for (name, _), by_number in experts.items():
        if sorted(by_number) != list(range(len(by_number))):
            raise CheckpointError(
                f"{name}: a rank has the experts {sorted(by_number)}, which are not the first {len(by_number)}"
            )
        parts = [by_number[number].piece for number in range(len(by_number))]
        held.setdefault(name, []).append(Held(by_number[0].place, Stack(parts)))
    return held


def choose(layout: ParameterLayout, grid: Grid, held: Iterable[Held]) -> list[Piece] | None:
    """One shard for each combination of ranks that a parameter is sharded over; None if one is missing."""
    holders = list(held)
    chosen: list[Piece] = []
    for ranks in grid.combinations(layout):
        # Replicas: the first rank with the requested place on the axes that shard the parameter.
        match = next((h.piece for h in holders if all(h.place[axis] == rank for axis, rank in ranks.items())), None)
        if match is None:
            return None
        chosen.append(match)
    return chosen
