"""Which rank writes what: every element of a checkpoint once, with replicated data spread over the replicas."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.checkpoint_specs import Fragment
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.reductions import any_over
from mt_core.tensor_slice import TensorSlice


class WriteItem(NamedTuple):
    """A slice of a tensor that a rank holds and could write. shape: of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor_slice: TensorSlice

    @property
    def num_bytes(self) -> int:
        return self.tensor_slice.numel * self.dtype.itemsize


@dataclass
class WritePlan:
    """Caches the assignment of this rank. It is computed again only when the fragments change."""

    _claims: list[WriteItem] | None = None
    _own: tuple[int, ...] = ()

    def share(self, fragments: Sequence[Fragment], ctx: ParallelContext) -> list[Fragment]:
        """The fragments of this rank that it has to write. Collective over the world."""
        claims = [claim_of(fragment) for fragment in fragments]
        # All ranks plan together, or none does. In the usual case a save costs one all-reduce of a flag and no
        # gathering of claims.
        if any_over(claims != self._claims, ctx.world, ctx.device):
            everyone = gather_claims(claims, ctx)
            shares = share_out(everyone) if everyone is not None else None
            self._claims, self._own = claims, _scatter(shares, ctx)
        return [fragments[number] for number in self._own]


def collect(fragments: Sequence[Fragment], ctx: ParallelContext) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of all ranks' fragments, one at a time, on CPU on the first rank; others get empty ones.

    Collective: every rank has to exhaust the iterator.
    """
    local = {(fragment.name, fragment.tensor_slice): fragment for fragment in fragments}
    for name, shape, dtype, places in _table(fragments, ctx):
        # Slices cover the tensor (_require_cover), so no element stays uninitialized.
        whole = torch.empty(shape if ctx.is_writer else (0,), dtype=dtype)
        # Every rank goes through the same table, so sends and receives pair up in order.
        for rank, tensor_slice in places:
            if ctx.is_writer and rank == 0:
                whole[tensor_slice.slices] = local[name, tensor_slice].tensor().detach().cpu()
            elif ctx.is_writer:
                # On the device of the group's backend: NCCL sends no host memory.
                values = torch.empty(tensor_slice.shape, dtype=dtype, device=ctx.device)
                dist.recv(values, src=ctx.world.ranks[rank], group=ctx.world.group)
                whole[tensor_slice.slices] = values.cpu()
            elif rank == ctx.world.rank:
                values = local[name, tensor_slice].tensor().detach().to(ctx.device).contiguous()
                dist.send(values, dst=ctx.world.ranks[0], group=ctx.world.group)
        yield name, whole


Row = tuple[str, tuple[int, ...], torch.dtype, list[tuple[int, TensorSlice]]]


def _table(fragments: Sequence[Fragment], ctx: ParallelContext) -> list[Row]:
    """Name, shape and dtype of each tensor, and which rank holds which slice; the same on all ranks."""
    everyone = gather_claims([claim_of(fragment) for fragment in fragments], ctx)
    rows: dict[str, Row] = {}
    for rank, numbers in enumerate(share_out(everyone) if everyone is not None else []):
        for claim in ((everyone or [])[rank][number] for number in numbers):
            row = rows.setdefault(claim.name, (claim.name, claim.shape, claim.dtype, []))
            row[3].append((rank, claim.tensor_slice))
    table: list[Any] = [list(rows.values())]
    if ctx.world.size > 1:
        dist.broadcast_object_list(table, src=ctx.world.ranks[0], group=ctx.world.group)
    return table[0]


def claim_of(fragment: Fragment) -> WriteItem:
    return WriteItem(fragment.name, fragment.shape, fragment.dtype, fragment.tensor_slice)


def gather_claims(claims: list[WriteItem], ctx: ParallelContext) -> list[list[WriteItem]] | None:
    """All ranks' claims on the first rank, None on the others. Collective over the world."""
    world = ctx.world
    if world.size == 1:
        return [claims]
    everyone: list[Any] | None = [None] * world.size if ctx.is_writer else None
    dist.gather_object(claims, everyone, dst=world.ranks[0], group=world.group)
    return everyone


def _scatter(shares: list[tuple[int, ...]] | None, ctx: ParallelContext) -> tuple[int, ...]:
    if ctx.world.size == 1:
        return shares[0] if shares else ()
    received: list[Any] = [()]
    dist.scatter_object_list(received, shares, src=ctx.world.ranks[0], group=ctx.world.group)
    return received[0]


def share_out(everyone: Sequence[Sequence[WriteItem]]) -> list[tuple[int, ...]]:
    """For each rank the indices of its claims that it writes. A replicated slice goes to the holder with fewest bytes.

    The slices of a tensor have to be equal or disjoint, and cover it.
    """
    # (name, slice) -> (rank, index of its claim) of each rank that holds it.
    holders: dict[tuple[str, TensorSlice], list[tuple[int, int]]] = defaultdict(list)
    for rank, claims in enumerate(everyone):
        for number, claim in enumerate(claims):
            holders[claim.name, claim.tensor_slice].append((rank, number))
    _require_cover(everyone, holders)
    bytes_of = [0] * len(everyone)
    taken: list[list[int]] = [[] for _ in everyone]
    for places in sorted(holders.values(), key=len):  # replicated slices last: they balance the load
        # min() takes the first of equal ones: the plan is the same in every run.
        rank, number = min(places, key=lambda place: bytes_of[place[0]])
        bytes_of[rank] += everyone[rank][number].num_bytes
        taken[rank].append(number)
    return [tuple(sorted(numbers)) for numbers in taken]


def _require_cover(
    everyone: Sequence[Sequence[WriteItem]], holders: dict[tuple[str, TensorSlice], list[tuple[int, int]]]
) -> None:
    covered: dict[str, int] = defaultdict(int)
    for name, tensor_slice in holders:
        covered[name] += tensor_slice.numel
    for claim in (claim for claims in everyone for claim in claims):
        whole = math.prod(claim.shape)
        assert covered[claim.name] == whole, f"{claim.name}: ranks hold {covered[claim.name]} of {whole} elements"
