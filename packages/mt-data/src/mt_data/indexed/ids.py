"""Checks of what a writer is given: nothing is stored that would read back as something else."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike

from mt_core.errors import DataError
from mt_data.indexed.layout import LENGTH, MODE

MAX_LENGTH = int(np.iinfo(LENGTH).max)


def as_ids(ids: ArrayLike, dtype: np.dtype, *, longest: int | None = None) -> np.ndarray:
    """`ids` [length] as a C-ordered array of `dtype`; DataError unless every value is kept exactly.

    longest: the greatest length allowed.
    """
    array = _as_array(ids)
    if array.ndim != 1:
        raise DataError(f"a sequence of ids must have one dimension, got shape {array.shape}")
    if longest is not None and len(array) > longest:
        raise _too_long(len(array))
    # An empty list becomes float64 in NumPy, whose kind would be refused below.
    if array.dtype == dtype or not len(array):
        return np.ascontiguousarray(array, dtype)
    # Booleans, objects and (for integer dtypes) floats: casting would change them or hide a mistake of the caller.
    if array.dtype.kind not in ("iuf" if dtype.kind == "f" else "iu"):
        raise DataError(f"ids of dtype {array.dtype} cannot be stored as {dtype.name}")
    _refuse(array, _misfits(array, dtype), dtype)
    return array.astype(dtype)


def _as_array(ids: ArrayLike) -> np.ndarray:
    try:
        return np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise DataError(f"ids must be a flat list of numbers: {error}") from error


def _misfits(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """bool [length]: where a value would change."""
    if dtype.kind != "f":
        # The limits are Python integers, which a comparison does not cast to the array's dtype, where they may not fit.
        limits = np.iinfo(dtype)
        return (array < limits.min) | (array > limits.max)
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            # NaN differs from itself, and is kept as NaN.
            return (array.astype(dtype) != array) & ~np.isnan(array)
    # Integers up to 2^(mantissa bits + 1) have an exact float of the dtype: 2^24 for float32, 2^53 for float64.
    exact = 1 << (np.finfo(dtype).nmant + 1)
    # Unsigned arrays are not compared with a negative number.
    return (array > exact) | (array < -exact) if array.dtype.kind == "i" else array > exact


def _refuse(array: np.ndarray, misfits: np.ndarray, dtype: np.dtype) -> None:
    if misfits.any():
        position = int(np.argmax(misfits))
        raise DataError(
            f"id {array[position]} at position {position} does not fit {dtype.name}; write the data set with a wider "
            "dtype (dtype_for_vocab gives the one for a vocabulary), or check the tokenizer"
        )


def as_lengths(lengths: ArrayLike, total: int) -> np.ndarray:
    """`lengths` as int32 [sequences]; DataError unless they are counts that add up to `total`."""
    array = as_ids(lengths, np.dtype(np.int64))
    if array.sum() != total or (array < 0).any():
        raise DataError(f"lengths of sequences must be counts that add up to the {total} ids, got {lengths!r:.200}")
    if (longest := int(array.max(initial=0))) > MAX_LENGTH:
        raise _too_long(longest)
    return array.astype(LENGTH)


def _too_long(length: int) -> DataError:
    return DataError(f"a sequence of {length} tokens; the format allows at most {MAX_LENGTH}: split it")


def as_mode(mode: int, multimodal: bool) -> int:
    """`mode` of one sequence; DataError when it is no int8, or not 0 in a data set without modes."""
    mode = operator.index(mode)
    if mode:
        as_modes([mode], 1, multimodal)
    return mode


def as_modes(modes: ArrayLike | None, count: int, multimodal: bool) -> np.ndarray:
    """`modes` as int8 [count], 0 by default; DataError as in `as_mode`."""
    array = np.zeros(count, MODE) if modes is None else as_ids(modes, MODE)
    if len(array) != count:
        raise DataError(f"{len(array)} modes for {count} sequences")
    if not multimodal and array.any():
        raise DataError("modes other than 0 need a data set written with multimodal=True")
    return array
