"""What backends derive from attention patterns: documents of a packed batch, and values kept for each pattern."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionPattern

# -- values derived once for each pattern, though many layers use it --------------------------------------

T = TypeVar("T")


class PerPattern(Generic[T]):
    """Values by pattern (the object, not its content) and a key; they go when their pattern goes."""

    def __init__(self) -> None:
        # By id: a dataclass that compares by value has no hash, so it cannot be a key of a WeakKeyDictionary.
        self._known: dict[int, tuple[weakref.ref[AttentionPattern], dict[Hashable, T]]] = {}

    def get(self, pattern: AttentionPattern, key: Hashable, make: Callable[[], T]) -> T:
        values = self._values(pattern)
        if key not in values:
            values[key] = make()
        return values[key]

    def _values(self, pattern: AttentionPattern) -> dict[Hashable, T]:
        entry = self._known.get(id(pattern))
        # An id may be used again by a new pattern before the callback of the old one has run; replacing the entry drops
        # the old reference and its callback.
        if entry is None or entry[0]() is not pattern:
            entry = self._known[id(pattern)] = (weakref.ref(pattern, self._forget(id(pattern))), {})
        return entry[1]

    def _forget(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            self._known.pop(key, None)

        return forget


@dataclass(frozen=True)
class Documents:
    """starts: [documents + 1] int32, first token of each in the flattened batch, then the number of tokens. longest:
    an upper bound of their lengths."""

    starts: Tensor
    longest: int


def find_documents(segment_ids: Tensor) -> Documents:
    """segment_ids [B, S], equal within a document and different from one to the next; a row starts a new one.

    The shapes depend on the number of documents, so this synchronizes with the GPU: once per batch, not per layer.
    """
    batch, sequence = segment_ids.shape
    first = torch.ones(batch, sequence, dtype=torch.bool, device=segment_ids.device)
    first[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = first.flatten().nonzero()[:, 0]
    end = starts.new_full((1,), batch * sequence)
    # The sequence length bounds every document: reading the true maximum would be one more host wait.
    return Documents(torch.cat([starts, end]).to(torch.int32), sequence)


def is_packed(pattern: AttentionPattern, queries: int, keys: int) -> bool:
    """Whether the pattern is documents and perhaps a window, and nothing else, over whole sequences."""
    others = (pattern.alibi_slopes, pattern.key_padding, pattern.bias)
    return pattern.segment_ids is not None and queries == keys and all(x is None for x in others)


def window_sides(pattern: AttentionPattern) -> tuple[int, int]:
    """(keys before, keys after) that a query sees beside itself; -1 for all of them."""
    # A window counts the query itself.
    before = -1 if pattern.window is None else pattern.window - 1
    return before, 0 if pattern.causal else before
