"""The recipes: where scales come from, and what of a matrix is cast for products along either of its dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mt_core.nn.fp8.casts import (
    Granularity,
    Scaled,
    cast_row_blocks,
    cast_rows,
    cast_square_blocks,
    cast_tensor,
    padded,
)
from mt_core.nn.fp8.formats import Role, scale_of
from mt_core.nn.fp8.history import AmaxHistory, largest_over
from mt_core.parallel.context import SINGLE, Axis

Map = Callable[[Tensor], Tensor]
"""Of [rows, ...] to another number of rows, such as gathering them."""


class Operand(Protocol):
    """A matrix [rows, columns] that takes part in two products."""

    @property
    def scale(self) -> Tensor | None:
        """Of the whole matrix, where it has one."""
        ...

    def kept(self) -> Tensor:
        """What of it a backward pass needs."""
        ...

    def along_columns(self, map_rows: Map | None = None) -> Scaled:
        """[rows, columns], to be contracted along columns. map_rows is applied to what is cast."""
        ...

    def along_rows(self) -> Scaled:
        """[columns, rows], to be contracted along rows."""
        ...


@dataclass(frozen=True)
class WholeCast:
    """One scale for all of it: cast once, transposed as bytes."""

    cast: Scaled

    @property
    def scale(self) -> Tensor | None:
        return self.cast.scale

    def kept(self) -> Tensor:
        return self.cast.data

    def along_columns(self, map_rows: Map | None = None) -> Scaled:
        if map_rows is None:
            return self.cast
        return Scaled(map_rows(self.cast.data), self.cast.scale, self.cast.granularity)

    def along_rows(self) -> Scaled:
        data = padded(self.cast.data.t(), self.cast.granularity.multiple).contiguous()
        return Scaled(data, self.cast.scale, self.cast.granularity)


Cast = Callable[[Tensor, torch.dtype, int], Scaled]


@dataclass(frozen=True)
class CastByDirection:
    """Scales belong to the dimension of a product: it is cast once for each."""

    x: Tensor
    cast: Cast
    dtype: torch.dtype
    margin: int

    scale = None

    def kept(self) -> Tensor:
        return self.x

    def along_columns(self, map_rows: Map | None = None) -> Scaled:
        scaled = self.cast(self.x, self.dtype, self.margin)
        if map_rows is None:
            return scaled
        return Scaled(map_rows(scaled.data), map_rows(scaled.scale), scaled.granularity)

    def along_rows(self) -> Scaled:
        return self.cast(self.x.t(), self.dtype, self.margin)


class Scaling(Protocol):
    """A recipe in one layer."""

    def operand(
        self, x: Tensor, role: Role, *, cut_over: Axis = SINGLE, note: bool = False, scale: Tensor | None = None
    ) -> Operand:
        """x: [rows, columns]. cut_over: ranks that hold the other shards of the matrix, and agree with this one on a
        scale of the whole. note: count it as one of the step. scale: the one that it got before."""
        ...

    def restored(self, kept: Tensor, scale: Tensor | None, role: Role) -> Operand:
        """The operand that had `kept` and `scale`."""
        ...


@dataclass(frozen=True)
class CurrentScaling:
    """tensorwise: one scale, by the largest magnitude of the matrix itself."""

    dtypes: Mapping[Role, torch.dtype]
    margin: int = 0

    def operand(
        self, x: Tensor, role: Role, *, cut_over: Axis = SINGLE, note: bool = False, scale: Tensor | None = None
    ) -> Operand:
        if scale is None:
            scale = scale_of(largest_over(amax_of(x), cut_over), self.dtypes[role], self.margin)
        return WholeCast(cast_tensor(x, scale, self.dtypes[role]))

    def restored(self, kept: Tensor, scale: Tensor | None, role: Role) -> Operand:
        return _whole(kept, scale)


@dataclass(frozen=True)
class DelayedScaling:
    """delayed: one scale, by the largest magnitudes of the steps before. A step without any before it is scaled by
    its own. A matrix that is not finite becomes NaN instead of the largest numbers."""

    dtypes: Mapping[Role, torch.dtype]
    history: AmaxHistory
    margin: int = 0

    def operand(
        self, x: Tensor, role: Role, *, cut_over: Axis = SINGLE, note: bool = False, scale: Tensor | None = None
    ) -> Operand:
        if scale is None:
            scale = self._scale(x, role, cut_over, note)
        return WholeCast(cast_tensor(x, scale, self.dtypes[role]))

    def restored(self, kept: Tensor, scale: Tensor | None, role: Role) -> Operand:
        return _whole(kept, scale)

    def _scale(self, x: Tensor, role: Role, cut_over: Axis, note: bool) -> Tensor:
        amax, past = amax_of(x), self.history.amax(role)
        if note:
            self.history.note(role, amax)
        if not self.history.has_stepped:
            past = torch.where(past < 0.0, largest_over(amax, cut_over), past)
        return scale_of(past + 0.0 * amax, self.dtypes[role], self.margin)


@dataclass(frozen=True)
class RowScaling:
    """rowwise: a scale for each row of both operands."""

    dtypes: Mapping[Role, torch.dtype]
    margin: int = 0

    def operand(
        self, x: Tensor, role: Role, *, cut_over: Axis = SINGLE, note: bool = False, scale: Tensor | None = None
    ) -> Operand:
        return CastByDirection(x, cast_rows, self.dtypes[role], self.margin)

    def restored(self, kept: Tensor, scale: Tensor | None, role: Role) -> Operand:
        return self.operand(kept, role)


@dataclass(frozen=True)
class BlockScaling:
    """blockwise: a scale for 1 x 128 numbers of inputs and gradients, and for 128 x 128 of weights."""

    dtypes: Mapping[Role, torch.dtype]
    margin: int = 0

    def operand(
        self, x: Tensor, role: Role, *, cut_over: Axis = SINGLE, note: bool = False, scale: Tensor | None = None
    ) -> Operand:
        cast = cast_square_blocks if role == "weight" else cast_row_blocks
        return CastByDirection(x, cast, self.dtypes[role], self.margin)

    def restored(self, kept: Tensor, scale: Tensor | None, role: Role) -> Operand:
        return self.operand(kept, role)


def amax_of(x: Tensor) -> Tensor:
    """[] fp32, the largest magnitude; 0 for a matrix without elements."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def _whole(data: Tensor, scale: Tensor | None) -> Operand:
    assert scale is not None
    return WholeCast(Scaled(data, scale, Granularity.TENSOR))
