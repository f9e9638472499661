"""Slices: parts of a tensor that are cut along its dimensions, as places and sizes without the tensor itself.

What a rank holds of a parameter is a few slices of the canonical tensor; checkpoints are written and read by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSlice:
    """Elements start[d] ... start[d] + shape[d] - 1 of each dimension d."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> TensorSlice:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts the slice out of the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def is_inside(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has all elements of the slice."""
        return len(self.start) == len(shape) and all(
            start >= 0 and start + size <= whole
            for start, size, whole in zip(self.start, self.shape, shape, strict=True)
        )

    def meet(self, other: TensorSlice) -> TensorSlice | None:
        """The elements that both have, None if there are none."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(end - first for end, first in zip(ends, start, strict=True))
        return TensorSlice(start, shape) if all(size > 0 for size in shape) else None

    def relative_to(self, origin: tuple[int, ...]) -> TensorSlice:
        """The same elements, counted from `origin`."""
        return TensorSlice(tuple(place - first for place, first in zip(self.start, origin, strict=True)), self.shape)

    def placed_at(self, origin: tuple[int, ...]) -> TensorSlice:
        """The inverse of `relative_to`."""
        return TensorSlice(tuple(place + first for place, first in zip(self.start, origin, strict=True)), self.shape)


def slices_of_range(shape: tuple[int, ...], first: int, last: int) -> Iterator[TensorSlice]:
    """Slices of the elements first ... last - 1 of a row-major tensor, in their order: the end of a row, whole rows,
    the beginning of a row, and the same within the rows that are not whole."""
    if first >= last:
        return
    if not shape:
        yield TensorSlice((), ())
        return
    # Example: shape (3, 4), elements 2 to 10. top = 1, bottom = 2: the end of row 0 (2 3), row 1 whole (4 to 7), the
    # beginning of row 2 (8 9 10). A row is the whole of the dimensions behind the first.
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row
    # No border between rows lies in the range: it is inside one row.
    if top > bottom:
        yield from _within_row(shape, bottom, first, last)
        return
    if first < top * row:
        yield from _within_row(shape, top - 1, first, top * row)
    if top < bottom:
        yield TensorSlice((top,) + (0,) * (len(shape) - 1), (bottom - top, *shape[1:]))
    if bottom * row < last:
        yield from _within_row(shape, bottom, bottom * row, last)


def _within_row(shape: tuple[int, ...], number: int, first: int, last: int) -> Iterator[TensorSlice]:
    # Elements in the rows before this one.
    before = number * math.prod(shape[1:])
    for tensor_slice in slices_of_range(shape[1:], first - before, last - before):
        yield TensorSlice((number, *tensor_slice.start), (1, *tensor_slice.shape))
