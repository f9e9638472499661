"""Experts that generation chose, by request and position, and their form in completions and rows."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Experts = NDArray[np.int16]
"""[positions, routers x k], -1 where nothing was noted."""
Parts = Mapping[int, Sequence[tuple[int, Experts]]]
"""Request -> the first position and the experts of each of its forward passes."""


class RoutingRecorder:
    """Takes what routers chose in each step of an engine."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, Experts]]] = {}

    def add(self, batch: Any, chosen: Sequence[Tensor]) -> None:
        """batch: the engine's CachedBatch. chosen: [T, k] of each router; the first of them are those of its chunks, in
        their order."""
        together: Experts = torch.cat(list(chosen), 1).cpu().numpy()
        end = 0
        for chunk in batch.sequences:
            start, end = end, end + chunk.count
            self._parts.setdefault(chunk.sequence.request.id, []).append((chunk.start, together[start:end]))

    def take(self) -> Parts:
        taken, self._parts = self._parts, {}
        return taken


class RoutingByPrefix:
    """Experts of positions by all tokens up to them, of one version of the weights: what an engine has in its cache it
    does not compute again."""

    def __init__(self) -> None:
        self._known: dict[int, Experts] = {}

    def forget(self) -> None:
        """The weights have changed."""
        self._known = {}

    def completed(self, tokens: Sequence[int], prompt: int, parts: Iterable[tuple[int, Experts]]) -> Experts | None:
        """The experts of all tokens but the last, which is no input; None where nothing was computed. prompt: of how
        many tokens others may begin alike."""
        parts = list(parts)
        if not parts:
            return None
        experts = np.full((len(tokens) - 1, parts[0][1].shape[1]), -1, np.int16)
        for start, part in parts:
            # A later pass has the same weights; the last one counts.
            experts[start : start + len(part)] = part[: max(len(experts) - start, 0)]
        for position, key in enumerate(_prefix_keys(tokens[:prompt])):
            if position < len(experts):
                if experts[position, 0] < 0:
                    experts[position] = self._known.get(key, experts[position])
                else:
                    self._known[key] = experts[position].copy()
        return experts


def _prefix_keys(tokens: Sequence[int]) -> Iterable[int]:
    key = 0
    for token in tokens:
        key = hash((key, token))
        yield key


def joined(before: Experts | None, after: Experts | None) -> Experts | None:
    """Experts of a completion that went on: those of the weights that drew a token stay."""
    if before is None or after is None:
        return before if after is None else after
    whole = after.copy()
    known = before[: len(whole)]
    whole[: len(known)] = np.where(known >= 0, known, whole[: len(known)])
    return whole


def encoded(experts: Experts) -> str:
    """A JSON value of the choices."""
    data = base64.b64encode(zlib.compress(experts.tobytes())).decode()
    return f"{experts.shape[1]}:{data}"


def decoded(text: str) -> Experts | None:
    if not text:
        return None
    width, _, data = text.partition(":")
    return np.frombuffer(zlib.decompress(base64.b64decode(data)), np.int16).reshape(-1, int(width))
