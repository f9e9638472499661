"""How matrices are cast: in plain torch, the reference, or by the kernels of another implementation of Casts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from mt_core.nn.fp8.activated import Matrix, computed
from mt_core.nn.fp8.casts import (
    Granularity,
    Scaled,
    cast_row_blocks,
    cast_rows,
    cast_square_blocks,
    cast_tensor,
    padded,
)
from mt_core.nn.fp8.formats import scale_of

Map = Callable[[Tensor], Tensor]
"""Of [rows, ...] to another number of rows, such as gathering them."""
Cast = Callable[[Matrix, torch.dtype, int], Scaled]
"""(x, format, margin) -> x with a scale for each row or block"""
Along = Literal["columns", "rows", "both"]
"""What the products of a matrix will be contracted along. A cast may give up to what is named."""


@dataclass(frozen=True)
class WholeCast:
    """One scale for all of it: cast once. column_major: the same numbers [rows, columns] with those of a column next to
    one another, perhaps with rows of zeros behind them; None: transposed as bytes when it is needed."""

    cast: Scaled
    column_major: Tensor | None = None

    @property
    def scale(self) -> Tensor | None:
        return self.cast.scale

    def kept(self) -> Tensor:
        # For the weight's gradient: the order that its product reads, where the cast has given it.
        return self.cast.data if self.column_major is None else self.column_major

    def along_columns(self, map_rows: Map | None = None) -> Scaled:
        if map_rows is None:
            return self.cast
        # One scale for the whole matrix, which ranks agreed on: gathering the bytes is enough.
        return Scaled(map_rows(self.cast.data), self.cast.scale, self.cast.granularity)

    def along_rows(self) -> Scaled:
        # [columns, rows]; the number of tokens need not be a multiple of what products take.
        data = padded(self.kept().t(), self.cast.granularity.multiple).contiguous()
        return Scaled(data, self.cast.scale, self.cast.granularity)


def restored_cast(kept: Tensor, scale: Tensor) -> WholeCast:
    """The cast that had `kept` and `scale`, for a product along its rows."""
    return WholeCast(Scaled(kept, scale, Granularity.TENSOR))


class Casts(Protocol):
    """x: [rows, columns]; of `rows`, `row_blocks` and `square_blocks` also a transposed view."""

    @property
    def rows(self) -> Cast:
        """cast_rows"""
        ...

    @property
    def row_blocks(self) -> Cast:
        """cast_row_blocks"""
        ...

    @property
    def square_blocks(self) -> Cast:
        """cast_square_blocks"""
        ...

    def amaxes(self, x: Matrix) -> Tensor:
        """fp32, [] or [n]: magnitudes of which the largest is that of x."""
        ...

    def by_amaxes(self, x: Matrix, amaxes: Tensor, dtype: torch.dtype, margin: int, along: Along) -> WholeCast:
        """By the largest of these magnitudes (see scale_of)."""
        ...

    def by_scale(self, x: Matrix, scale: Tensor, dtype: torch.dtype, along: Along) -> WholeCast:
        """scale: [] fp32."""
        ...

    def by_past(
        self, x: Matrix, past: Tensor, noted: Tensor | None, dtype: torch.dtype, margin: int, along: Along
    ) -> WholeCast:
        """By the magnitude `past`, [] fp32. An x that is not finite becomes NaN, by its scale; of another one the
        largest magnitude is noted: noted = max(noted, it), [] fp32."""
        ...


class TorchCasts:
    """In plain torch: the reference, and what torch.compile makes kernels of."""

    def rows(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return cast_rows(computed(x), dtype, margin)

    def row_blocks(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return cast_row_blocks(computed(x), dtype, margin)

    def square_blocks(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return cast_square_blocks(computed(x), dtype, margin)

    def amaxes(self, x: Matrix) -> Tensor:
        return amax_of(computed(x))

    def by_amaxes(self, x: Matrix, amaxes: Tensor, dtype: torch.dtype, margin: int, along: Along) -> WholeCast:
        return self.by_scale(x, scale_of(amaxes, dtype, margin), dtype, along)

    def by_scale(self, x: Matrix, scale: Tensor, dtype: torch.dtype, along: Along) -> WholeCast:
        return WholeCast(cast_tensor(computed(x), scale, dtype))

    def by_past(
        self, x: Matrix, past: Tensor, noted: Tensor | None, dtype: torch.dtype, margin: int, along: Along
    ) -> WholeCast:
        x = computed(x)
        amax = amax_of(x)
        if noted is not None:
            note(noted, amax)
        # 0 * inf and 0 * NaN are NaN: the scale of a matrix that is not finite becomes NaN without an `if` on the host.
        return self.by_scale(x, scale_of(past + 0.0 * amax, dtype, margin), dtype, along)


TORCH_CASTS = TorchCasts()


def note(noted: Tensor, amax: Tensor) -> None:
    """noted = max(noted, amax), both [] fp32. An amax that is not finite is left out."""
    # Else a step that is not finite would decide the scales of the steps after it.
    torch.maximum(noted, torch.where(amax.isfinite(), amax, 0.0), out=noted)


def amax_of(x: Tensor) -> Tensor:
    """[] fp32, the largest magnitude; 0 for a matrix without elements."""
    # amax is exact in 16 bits, so only the result is widened.
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
