"""Weights from the processes that train to those that generate, over a group of both, without a file.

Each weight is a tensor in canonical shape, of which every process has slices: the layout of training and that of
generation may differ in any way. Training plans once which process sends which part to which generator; a part that
several have is sent by the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.checkpoint_specs import Fragment
from mt_core.parallel.context import ParallelContext
from mt_core.tensor_slice import TensorSlice
from mt_core.train.engine import Engine
from mt_infer.refit import Copy, Slices, plan_copies
from mt_tune.rl.generators.messages import Connect
from mt_tune.rl.weight_hashes import Dtypes, module_fragments, trained_fragments


def join_transfer(store: dist.Store, rank: int, size: int, device: torch.device, seconds: float) -> Any:
    """The process group over which weights are sent, beside the groups of training and of generation. Collective over
    the processes of both."""
    # Not a group of torch's default world: that of training and that of generation are worlds of their own, in which
    # ranks, barriers and files mean what they mean without the other one.
    weights_store, limit = dist.PrefixStore("weights", store), timedelta(seconds=seconds)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(weights_store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(weights_store, rank, size, options)


def slices_of(fragments: Iterable[Fragment]) -> Slices:
    slices: dict[str, tuple[TensorSlice, ...]] = {}
    for fragment in fragments:
        slices[fragment.name] = (*slices.get(fragment.name, ()), fragment.tensor_slice)
    return slices


def plan_transfer(trained: Sequence[Slices], generating: Sequence[Slices]) -> list[list[Copy]]:
    """For each weight its parts, in one order for all. Ranks are those of the group of both: trainers come first.

    Raises ValueError for elements that a generator needs and that no trainer has.
    """
    nothing: Slices = {}
    sources = [*trained, *[nothing] * len(generating)]
    return plan_copies(sources, [*[nothing] * len(trained), *generating])


def arriving_at(rank: int, plan: Iterable[Iterable[Copy]]) -> Connect:
    parts = [[copy for copy in copies if copy.target == rank] for copies in plan]
    return Connect(
        [(copies[0].name, [(copy.tensor_slice, copy.source) for copy in copies]) for copies in parts if copies]
    )


class WeightSender:
    """On a process that trains. dtypes: of the generators' weights, which are rounded before they are sent."""

    def __init__(self, engine: Engine, plan: Iterable[Iterable[Copy]], dtypes: Dtypes, group: Any) -> None:
        rank = engine.ctx.world.rank
        self.engine, self.dtypes, self.group = engine, dtypes, group
        self._sent = [sent for copies in plan if (sent := [copy for copy in copies if copy.source == rank])]

    @torch.no_grad()
    def send(self) -> None:
        """The weights as they are now; `WeightReceiver.receive` is called on all generators meanwhile."""
        # The all-gather of updated weights overlaps with the next step and may still be under way.
        self.engine.weights.finish_gather()
        sources: dict[str, list[Fragment]] = {}
        for fragment in trained_fragments(self.engine):
            sources.setdefault(fragment.name, []).append(fragment)
        # Weight by weight: what is in flight are the parts of one, not a copy of the model.
        for copies in self._sent:
            parts = [self._part(sources[copy.name], copy) for copy in copies]
            # `parts` lives until all are sent.
            for work in [self.group.send([part], copy.target, 0) for part, copy in zip(parts, copies, strict=True)]:
                work.wait()

    def _part(self, fragments: Sequence[Fragment], copy: Copy) -> Tensor:
        part = part_of(fragments, copy.tensor_slice)
        return part.to(self.dtypes[copy.name]).contiguous()


class WeightReceiver:
    """On a process that generates."""

    def __init__(self, model: nn.Module, ctx: ParallelContext, connect: Connect, group: Any) -> None:
        self.group, self._arriving = group, connect.arriving
        self._targets: dict[str, list[Fragment]] = {}
        for fragment in module_fragments(model, ctx):
            self._targets.setdefault(fragment.name, []).append(fragment)

    @torch.no_grad()
    def receive(self) -> None:
        for name, parts in self._arriving:
            targets = [part_of(self._targets[name], tensor_slice) for tensor_slice, _ in parts]
            # A receive cannot write to a view with strides.
            received = [torch.empty(target.shape, dtype=target.dtype, device=target.device) for target in targets]
            works = [self.group.recv([buffer], source, 0) for buffer, (_, source) in zip(received, parts, strict=True)]
            for work, target, buffer in zip(works, targets, received, strict=True):
                work.wait()
                target.copy_(buffer)


def part_of(fragments: Sequence[Fragment], tensor_slice: TensorSlice) -> Tensor:
    """The memory of these elements, within the fragment that has them all."""
    for fragment in fragments:
        if fragment.tensor_slice.meet(tensor_slice) == tensor_slice:
            part: Tensor = fragment.tensor()[tensor_slice.relative_to(fragment.tensor_slice.start).slices]
            return part
    raise AssertionError(f"{tensor_slice} is in no fragment")
