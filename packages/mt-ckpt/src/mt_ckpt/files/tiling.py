"""Whether slices of a tensor tile it: each element in one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

from mt_core.tensor_slice import TensorSlice

MAX_CUT_DIMS = 8
"""Limit of the dimensions that slices may cut; checkpoints cut two or three dimensions."""


def tiles(shape: tuple[int, ...], slices: Sequence[TensorSlice]) -> bool:
    """Whether every element of a tensor is in one of the slices, and only in one.

    A function on the grid is known by its mixed differences. Those of a slice are 1 and -1 at its corners, so that
    slices add up to the whole tensor just when their corners, with these signs, add up to its. That takes one pass,
    however irregular the slices are. False for slices that cut more than MAX_CUT_DIMS dimensions.
    """
    if any(len(part.start) != len(shape) or len(part.shape) != len(shape) for part in slices):
        return False
    # Dimensions that no slice cuts are the same factor on both sides, and 2^d corners per slice are fewer without them.
    cut = [d for d, size in enumerate(shape) if any((part.start[d], part.shape[d]) != (0, size) for part in slices)]
    if len(cut) > MAX_CUT_DIMS or any(min((*part.start, *part.shape), default=0) < 0 for part in slices):
        return False
    # Slices without elements tile a tensor without elements, wherever they begin.
    if 0 in shape and all(0 in part.shape for part in slices):
        return True
    corners: Counter[tuple[int, ...]] = Counter()
    for part in slices:
        _add_corners(corners, [part.start[d] for d in cut], [part.shape[d] for d in cut])
    whole: Counter[tuple[int, ...]] = Counter()
    _add_corners(whole, [0] * len(cut), [shape[d] for d in cut])
    # One dimension, slices [0, 2) and [2, 4) of 4: +1 at 0, -1 at 2, +1 at 2, -1 at 4. The corners at 2 cancel; those
    # of the whole, +1 at 0 and -1 at 4, are left.
    corners.subtract(whole)
    return not any(corners.values())


def _add_corners(corners: Counter[tuple[int, ...]], offsets: Sequence[int], sizes: Sequence[int]) -> None:
    for ends in product((0, 1), repeat=len(offsets)):
        corner = tuple(offset + size * end for offset, size, end in zip(offsets, sizes, ends, strict=True))
        corners[corner] += -1 if sum(ends) % 2 else 1
