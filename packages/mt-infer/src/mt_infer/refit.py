"""Copies a trainer's weights into an engine's model, also when their layouts differ, without a file in between.

Both live in the same world. Each weight is a tensor in canonical shape, of which trainer and engine have slices on
every rank (`ParameterLayout`); a slice that several ranks of the trainer have is sent by the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.checkpoint_specs import Fragment
from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.optim.master_weights import MasterWeights
from mt_core.parallel.context import ParallelContext
from mt_core.tensor_slice import TensorSlice
from mt_core.train.checkpoint.local_shards import LocalShard, identity

Slices = Mapping[str, tuple[TensorSlice, ...]]
"""Weight -> the canonical slices that a rank has."""


@dataclass(frozen=True)
class Copy:
    """The elements `tensor_slice` of a weight go from one rank to another."""

    name: str
    tensor_slice: TensorSlice
    source: int
    target: int


class Refit:
    """Construction and each call are collective over the world. weights: the trainer's.

    Raises ValueError when the engine's model has weights that no rank of the trainer has.
    """

    def __init__(
        self,
        weights: MasterWeights,
        layouts: Mapping[str, ParameterLayout],
        ctx: ParallelContext,
        model: nn.Module,
        own_ctx: ParallelContext,
    ) -> None:
        self.weights = weights
        # A function: the trainer's tensors are looked up at each call, while their slices, and so the plan, stay the
        # same.
        self._sources = partial(_trained_fragments, weights, layouts, ctx)
        self._targets = {fragment_key(fragment): fragment for fragment in _fragments(model, own_ctx)}
        # Made once from what all ranks have: each rank derives its sends and receives from it, without further
        # agreement.
        self._copies = plan_copies(
            _of_all_ranks(_slices(self._sources())), _of_all_ranks(_slices(self._targets.values()))
        )

    @torch.no_grad()
    def __call__(self) -> None:
        """Copies the weights as they are now."""
        # The trainer's all-gather of updated weights overlaps with the next step and may still be under way.
        self.weights.finish_gather()
        sources: dict[str, list[Fragment]] = {}
        for fragment in self._sources():
            sources.setdefault(fragment.name, []).append(fragment)
        # Weight by weight: buffers in flight are those of one weight, not a second copy of the model. The order is the
        # same on all ranks, so that sends and receives of a pair match.
        for copies in self._copies:
            self._exchange(copies, sources.get(copies[0].name, []))

    def _exchange(self, copies: list[Copy], sources: list[Fragment]) -> None:
        """Sends and receives the parts of one weight."""
        this_rank, operations, arriving = _rank(), [], []
        targets = [fragment for (name, _), fragment in self._targets.items() if name == copies[0].name]
        for copy in copies:
            if this_rank == copy.source:
                part = _part(sources, copy.tensor_slice)
                # On this rank already: no message.
                if this_rank == copy.target:
                    _part(targets, copy.tensor_slice).copy_(part)
                    continue
                # fp32 on the wire, since trainer and engine may have different dtypes; exact for 16-bit weights, and
                # copy_ rounds where they arrive.
                sent = part.to(torch.float32).contiguous()
                operations.append(dist.P2POp(dist.isend, sent, copy.target))
            elif this_rank == copy.target:
                part = _part(targets, copy.tensor_slice)
                received = torch.empty(part.shape, dtype=torch.float32, device=part.device)
                operations.append(dist.P2POp(dist.irecv, received, copy.source))
                arriving.append((part, received))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        # After the wait: `part` is often a strided view, which a receive cannot write to.
        for part, received in arriving:
            part.copy_(received)


def fragment_key(fragment: Fragment) -> tuple[str, TensorSlice]:
    return fragment.name, fragment.tensor_slice


def plan_copies(sources: list[Slices], targets: list[Slices]) -> list[list[Copy]]:
    """For each weight the copies, in the same order on every rank. sources, targets: of each rank.

    Raises ValueError for elements that are requested and that no rank has.
    """
    names = dict.fromkeys(name for wanted in targets for name in wanted)
    return [list(_copies_of(name, sources, targets)) for name in names]


def _copies_of(name: str, sources: list[Slices], targets: list[Slices]) -> Iterator[Copy]:
    # Reversed, so that the lowest rank that has a slice is the one that is kept.
    first_owner = {held: rank for rank in reversed(range(len(sources))) for held in sources[rank].get(name, ())}
    for target, wanted in enumerate(targets):
        for tensor_slice in wanted.get(name, ()):
            # Prefer what the rank has itself.
            owners = {**first_owner, **dict.fromkeys(sources[target].get(name, ()), target)}
            overlaps = [
                (rank, common) for held, rank in owners.items() if (common := tensor_slice.meet(held)) is not None
            ]
            # Slices of one weight are equal or disjoint among the trainer's ranks, so that sizes add up to a full
            # cover.
            if sum(common.numel for _, common in overlaps) != tensor_slice.numel:
                raise ValueError(f"no ranks of the trainer have all of {name}: their model is another")
            yield from (Copy(name, common, rank, target) for rank, common in overlaps)


def _trained_fragments(
    weights: MasterWeights, layouts: Mapping[str, ParameterLayout], ctx: ParallelContext
) -> Iterator[Fragment]:
    for name, layout in layouts.items():
        slices, part = weights.owned_weight(name)
        yield from LocalShard(name, layout, part.dtype, slices, partial(identity, part)).fragments(ctx)


def _fragments(model: nn.Module, ctx: ParallelContext) -> Iterator[Fragment]:
    layouts = parameter_layouts(model)
    for name, parameter in model.named_parameters():
        part = parameter.detach()
        whole = [TensorSlice.whole(tuple(part.shape))]
        yield from LocalShard(name, layouts[name], part.dtype, whole, partial(identity, part)).fragments(ctx)


def _slices(fragments: Iterable[Fragment]) -> Slices:
    slices: dict[str, tuple[TensorSlice, ...]] = {}
    for fragment in fragments:
        slices[fragment.name] = (*slices.get(fragment.name, ()), fragment.tensor_slice)
    return slices


def _part(fragments: list[Fragment], tensor_slice: TensorSlice) -> Tensor:
    """The memory of these elements, within the fragment that has them all."""
    for fragment in fragments:
        if fragment.tensor_slice.meet(tensor_slice) == tensor_slice:
            part: Tensor = fragment.tensor()[tensor_slice.relative_to(fragment.tensor_slice.start).slices]
            return part
    raise AssertionError(f"{tensor_slice} is in no fragment")


def _of_all_ranks(local: Slices) -> list[Slices]:
    if not dist.is_initialized():
        return [local]
    everyone: list[Slices | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    return [held or {} for held in everyone]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
