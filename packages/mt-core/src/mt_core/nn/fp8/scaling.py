"""The recipes: where scales come from, and what of a matrix is cast for products along either of its dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mt_core.nn.fp8.history import AmaxHistory, largest_over
from mt_core.nn.kernels.reference.fp8_casts import (
    TORCH_CASTS,
    Along,
    Cast,
    Casts,
    Map,
    Matrix,
    Role,
    Scaled,
    restored_cast,
    scale_of,
)
from mt_core.parallel.context import SINGLE, Axis


class Operand(Protocol):
    """A matrix [rows, columns] that takes part in two products."""

    @property
    def scale(self) -> Tensor | None:
        """Scale of the whole matrix, where it has one."""
        ...

    def kept(self) -> Matrix:
        """What of it a backward pass needs."""
        ...

    def along_columns(self, map_rows: Map | None = None) -> Scaled:
        """[rows, columns], to be contracted along columns. map_rows is applied to what is cast."""
        ...

    def along_rows(self) -> Scaled:
        """[columns, rows], to be contracted along rows."""
        ...


@dataclass(frozen=True)
class CastByDirection:
    """Scales belong to the dimension of a product: it is cast once for each."""

    x: Matrix
    cast: Cast
    dtype: torch.dtype
    margin: int

    scale = None

    def kept(self) -> Matrix:
        return self.x

    def along_columns(self, map_rows: Map | None = None) -> Scaled:
        scaled = self.cast(self.x, self.dtype, self.margin)
        # A scale for each row is gathered with the row.
        return scaled if map_rows is None else scaled.map_rows(map_rows)

    def along_rows(self) -> Scaled:
        # From the 16-bit matrix: rows of the transpose have other scales, so bytes of the first cast cannot be used.
        return self.cast(self.x.t(), self.dtype, self.margin)


class Scaling(Protocol):
    """A recipe in one layer."""

    def operand(
        self,
        x: Matrix,
        role: Role,
        *,
        along: Along = "columns",
        cut_over: Axis = SINGLE,
        note: bool = False,
        scale: Tensor | None = None,
        sample: int = 0,
    ) -> Operand:
        """x: [rows, columns]. along: of the products to come. cut_over: ranks that hold the other shards of the matrix,
        and agree with this one on a scale of the whole. note: count it as one of the step. scale: the one that it got
        before. sample: first one of the micro-batch, by which what is drawn at random is drawn."""
        ...

    def restored(self, kept: Matrix, scale: Tensor | None, role: Role, cut_over: Axis = SINGLE) -> Operand:
        """The operand that had `kept` and `scale`."""
        ...


@dataclass(frozen=True)
class CurrentScaling:
    """tensorwise: one scale, by the largest magnitude of the matrix itself."""

    dtypes: Mapping[Role, torch.dtype]
    margin: int = 0
    casts: Casts = TORCH_CASTS

    def operand(
        self,
        x: Matrix,
        role: Role,
        *,
        along: Along = "columns",
        cut_over: Axis = SINGLE,
        note: bool = False,
        scale: Tensor | None = None,
        sample: int = 0,
    ) -> Operand:
        casts, dtype = _outside_of_compiler(self.casts), self.dtypes[role]
        if scale is not None:
            return casts.by_scale(x, scale, dtype, along)
        # A collective for each sharded matrix. All ranks of the axis make the same calls in the same order, as they run
        # the same layers.
        return casts.by_amaxes(x, largest_over(casts.amaxes(x), cut_over), dtype, self.margin, along)

    def restored(self, kept: Matrix, scale: Tensor | None, role: Role, cut_over: Axis = SINGLE) -> Operand:
        return _restored(kept, scale)


@dataclass(frozen=True)
class DelayedScaling:
    """delayed: one scale, by the largest magnitudes of the steps before. A step without any before it is scaled by
    its own. A matrix that is not finite becomes NaN instead of the largest numbers."""

    dtypes: Mapping[Role, torch.dtype]
    history: AmaxHistory
    margin: int = 0
    casts: Casts = TORCH_CASTS

    def operand(
        self,
        x: Matrix,
        role: Role,
        *,
        along: Along = "columns",
        cut_over: Axis = SINGLE,
        note: bool = False,
        scale: Tensor | None = None,
        sample: int = 0,
    ) -> Operand:
        casts, dtype = _outside_of_compiler(self.casts), self.dtypes[role]
        # From the second step of this process on: no look at the matrix before the cast, and no branch on the device.
        if scale is None and self.history.has_stepped:
            noted = self.history.noted_of(role) if note else None
            return casts.by_past(x, self.history.amax(role), noted, dtype, self.margin, along)
        if scale is None:
            scale = self._first_scale(casts.amaxes(x).amax(), role, cut_over, note)
        return casts.by_scale(x, scale, dtype, along)

    def restored(self, kept: Matrix, scale: Tensor | None, role: Role, cut_over: Axis = SINGLE) -> Operand:
        return _restored(kept, scale)

    def _first_scale(self, amax: Tensor, role: Role, cut_over: Axis, note: bool) -> Tensor:
        """In this process, whose history may be that of a checkpoint."""
        if note:
            self.history.note(role, amax)
        past = self.history.amax(role)
        # NOTHING is -1: chosen on the device, as the history of a checkpoint is not read by the host.
        past = torch.where(past < 0.0, largest_over(amax, cut_over), past)
        return scale_of(past + 0.0 * amax, self.dtypes[role], self.margin)


def _outside_of_compiler(casts: Casts) -> Casts:
    """torch.compile joins casts in plain torch with the kernels before them."""
    # A Triton cast is a call that the compiler cannot join with others.
    return TORCH_CASTS if torch.compiler.is_compiling() else casts


@dataclass(frozen=True)
class RowScaling:
    """rowwise: a scale for each row of both operands."""

    dtypes: Mapping[Role, torch.dtype]
    margin: int = 0
    casts: Casts = TORCH_CASTS

    def operand(
        self,
        x: Matrix,
        role: Role,
        *,
        along: Along = "columns",
        cut_over: Axis = SINGLE,
        note: bool = False,
        scale: Tensor | None = None,
        sample: int = 0,
    ) -> Operand:
        return CastByDirection(x, _outside_of_compiler(self.casts).rows, self.dtypes[role], self.margin)

    def restored(self, kept: Matrix, scale: Tensor | None, role: Role, cut_over: Axis = SINGLE) -> Operand:
        return self.operand(kept, role)


@dataclass(frozen=True)
class BlockScaling:
    """blockwise: a scale for 1 x 128 numbers of inputs and gradients, and for 128 x 128 of weights."""

    dtypes: Mapping[Role, torch.dtype]
    margin: int = 0
    casts: Casts = TORCH_CASTS

    def operand(
        self,
        x: Matrix,
        role: Role,
        *,
        along: Along = "columns",
        cut_over: Axis = SINGLE,
        note: bool = False,
        scale: Tensor | None = None,
        sample: int = 0,
    ) -> Operand:
        casts = _outside_of_compiler(self.casts)
        cast = casts.square_blocks if role == "weight" else casts.row_blocks
        return CastByDirection(x, cast, self.dtypes[role], self.margin)

    def restored(self, kept: Matrix, scale: Tensor | None, role: Role, cut_over: Axis = SINGLE) -> Operand:
        return self.operand(kept, role)


def _restored(kept: Matrix, scale: Tensor | None) -> Operand:
    # One scale: the cast was kept in FP8 together with it.
    assert scale is not None
    assert isinstance(kept, Tensor)
    return restored_cast(kept, scale)
