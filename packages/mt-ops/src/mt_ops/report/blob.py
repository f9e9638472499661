"""Arrays of numbers as one compressed text that a page carries, and which of their points it carries."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from mt_ops.reading.run import Series


class Blob:
    """Arrays one after another. Bytes of the same significance stand together, which compresses twice as well.

    A reference to an array is its offset in bytes, its length and its type: `f` fp32, `u` uint32 as differences.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._known: dict[bytes, dict[str, Any]] = {}

    def floats(self, values: Any) -> dict[str, Any]:
        """values: [n]. Kept in fp32."""
        return self._add("f", values.astype("<f4"))

    def steps(self, steps: Any) -> dict[str, Any]:
        """steps: [n], increasing, from 0 to 2^32 - 1."""
        return self._add("u", np.diff(steps, prepend=0).astype("<u4"))

    def text(self) -> str:
        return base64.b64encode(zlib.compress(b"".join(self._parts), 6)).decode("ascii")

    def _add(self, kind: str, array: Any) -> dict[str, Any]:
        raw = array.view(np.uint8).reshape(-1, 4).T.tobytes()
        # Series of a run share their steps.
        if (known := self._known.get(kind.encode() + raw)) is not None:
            return known
        reference = {"at": self._size, "n": len(array), "kind": kind}
        self._known[kind.encode() + raw] = reference
        self._parts.append(raw)
        self._size += len(raw)
        return reference


def thinned(series: Series, most: int) -> Series:
    """At most about `most` points: of each of equal ranges of points the smallest and the largest, and whatever is
    not finite; with the first and the last. Everything where it has no more."""
    count = len(series)
    if count <= most:
        return series
    width = -(-count // max(most // 2 - 1, 1))
    whole = count // width * width
    table = series.values[:whole].reshape(-1, width)
    begin = np.arange(0, whole, width)
    lowest = begin + np.argmin(np.where(np.isnan(table), np.inf, table), axis=1)
    highest = begin + np.argmax(np.where(np.isnan(table), -np.inf, table), axis=1)
    kept = ~np.isfinite(series.values)
    kept[whole:] = True
    kept[lowest] = kept[highest] = True
    kept[[0, -1]] = True
    return Series(series.steps[kept], series.values[kept])
