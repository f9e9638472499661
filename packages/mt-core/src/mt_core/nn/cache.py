"""What generation keeps of computed positions, as layers declare it, and how they use it.

A layer that keeps something of past positions is a `KeepsState`: it declares what (`cached_state`), and calls the cache
of a forward pass in place of computing over its own sequence. A model passes the cache on, and has no code of its own
for generation. `mt_infer` implements `Cache`: pages of memory, batches of unequal sequences, prefixes in common.

The new positions of all sequences of a forward pass are packed into one row: tokens [1, T], activations [1, T, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class PositionState:
    """What a layer keeps of each position: tensors of these shapes (of one position, on this rank).

    window: positions at this distance or further back are never read again; None: all are. is_paged: the layer passes
    `paged` to `Cache.attend`.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    window: int | None = None
    is_paged: bool = False


@dataclass(frozen=True)
class SequenceState:
    """What a layer keeps of a whole sequence, whatever its length: shape and dtype of each tensor, zeros at first."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True)
class MemoryState:
    """What a layer keeps of each position of the encoder's output (`Conditioning` "memory"), computed once."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


@runtime_checkable
class KeepsState(Protocol):
    """A layer that keeps something for the positions to come."""

    def cached_state(self) -> PositionState | SequenceState | MemoryState: ...


def layers_with_state(*modules: nn.Module | None) -> Iterator[KeepsState]:
    """The layers in these modules that keep something."""
    for module in modules:
        if module is not None:
            yield from (layer for layer in module.modules() if isinstance(layer, KeepsState))


Conditioning = Mapping[str, Tensor]
"""What a model made of a request's other inputs (images, an encoder's text), once; see `Model.condition`."""


class CachedSequence(Protocol):
    """A sequence of a forward pass."""

    @property
    def start(self) -> int:
        """Number of positions before the new ones, which are in the cache."""
        ...

    @property
    def count(self) -> int:
        """Number of new positions."""
        ...

    @property
    def past(self) -> Tensor:
        """[start] ids at the positions before."""
        ...

    @property
    def new(self) -> Tensor:
        """[count] ids at the new positions."""
        ...

    @property
    def conditioning(self) -> Conditioning: ...


@dataclass(frozen=True)
class PagedScores:
    """From products of queries and keys to scores: times `scale`, then softcap * tanh(score / softcap), then minus
    slopes [N] * distance (ALiBi). Keys at the distance `window` or further back are not seen. sinks [N]: see
    mt_core.nn.attention.with_sinks."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None


class Pages(Protocol):
    """The cached positions of a decode step, which computes one new position of each of B sequences."""

    def attend(
        self, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], values: Tensor, scores: PagedScores
    ) -> Tensor:
        """queries: each [1, B, N, D]. keys, values: all places of the cache, [places, G, D] and [places, G, V], as
        `paged` is given them. Several queries and keys have their own D each, and their products are added.
        Returns [1, B, N, V]: each query over the positions of its sequence."""
        ...

    @property
    def room(self) -> int:
        """T: positions that a sequence has room for. It does not depend on their numbers, so that shapes are static."""
        ...

    @property
    def last(self) -> Tensor:
        """[B] int64: the new position of each sequence."""
        ...

    def places(self, positions: Tensor) -> Tensor:
        """positions [B, K] of each sequence, less than `room` -> [B, K]: where these are, among the places of the
        cache. Behind the last position any place may be given."""
        ...


class Cache(Protocol):
    """The cache of one forward pass over several sequences."""

    @property
    def tokens(self) -> Tensor:
        """[1, T] ids at the new positions."""
        ...

    @property
    def position_ids(self) -> Tensor:
        """[1, T]"""
        ...

    @property
    def capacities(self) -> Tensor:
        """[1, T]: the length that the sequence of each position may grow to."""
        ...

    @property
    def sequences(self) -> Sequence[CachedSequence]:
        """In the order of their positions in the row."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether every form of computing a layer must give the same bits as training's forward pass."""
        ...

    def attend(
        self,
        layer: KeepsState,
        attend: Callable[..., Tensor],
        new: tuple[Tensor, ...],
        kept: tuple[Tensor, ...],
        paged: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Adds `kept` (each [1, T, ...]) to the layer's PositionState, then `attend(*new, *all kept)` of each sequence.

        new: tensors [1, T, ...], of which attend is given the sequence's positions, [1, S, ...]. It is given what is
        kept of all positions so far, [1, K, ...], the new ones last; with a window, of the last that are read.
        Returns the results [1, S, ...] packed into a row.

        paged: `paged(pages, *new, *all places)` computes the same of one new position of each sequence, without a loop
        over sequences: see `Pages`.
        """
        ...

    def attend_memory(
        self,
        layer: KeepsState,
        attend: Callable[..., Tensor],
        new: tuple[Tensor, ...],
        make: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> Tensor:
        """Same as `attend`, over the layer's MemoryState: `make` computes it once a sequence from "memory" of its
        conditioning, of which the first "memory_length" positions are kept."""
        ...

    def advance(
        self,
        layer: KeepsState,
        advance: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]],
        inputs: tuple[Tensor, ...],
    ) -> Tensor:
        """Recurrent layers: `advance(inputs [B, S, ...], state [B, ...])` returns the output and the state behind it.

        Sequences with as many new positions may share a call.
        """
        ...

    def positions_for_logits(self, x: Tensor) -> Tensor:
        """[1, T, H] -> [1, R, H]: positions whose logits are requested."""
        ...
