"""`ParallelContext`: the rank of this process on every parallel axis, passed explicitly to the code that needs it.

Ranks are numbered with tensor parallel fastest, then context, data, pipeline (Megatron's `tp-cp-ep-dp-pp`):
rank = ((pp * DP + dp) * CP + cp) * TP + tp. Experts see the same processes of a pipeline stage through a
second grid, folded independently of the first: rank = ((pp * EDP + edp) * EP + ep) * ETP + etp.

| axis | processes that |
| --- | --- |
| tp | shard each layer's matrices |
| cp | shard each sequence |
| dp | have the same weights and other samples |
| pp | hold consecutive stages of layers |
| pp_backward | the same, for gradients, where these have communicators of their own |
| etp, ep, edp | shard an expert's matrices; hold different experts; have the same experts |
| dp_cp | together reduce the gradients of dense weights |
| model | together hold one copy of the model (tp x pp) |
| shard, replicate | dp_cp split in two (HSDP): shard the optimizer state; replicate it |
| expert_shard, expert_replicate | the same of edp |
| world | all processes |
| cp_inner, cp_outer | cp in two, for hierarchical attention |
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist

from mt_core.config.checks import listed
from mt_core.errors import ConfigError
from mt_core.parallel.communicators import (
    DEFAULT,
    CommunicatorOptions,
    group_arguments,
    require_device,
    require_several_ranks,
)

AxisName = Literal[
    "tp",
    "cp",
    "dp",
    "pp",
    "pp_backward",
    "etp",
    "ep",
    "edp",
    "dp_cp",
    "model",
    "shard",
    "replicate",
    "expert_shard",
    "expert_replicate",
    "world",
    "cp_inner",
    "cp_outer",
]


@dataclass
class Waited:
    """Seconds that the host of this rank has spent in blocking collectives of an axis."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Axis:
    """One parallel axis as this process sees it. group is None when the axis has one process."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    ranks: tuple[int, ...] = (0,)
    """Global ranks of the processes on it, by their rank on the axis."""
    waited: Waited = field(default_factory=Waited, compare=False, repr=False)


@dataclass(frozen=True)
class AxisSizes:
    """Sizes of the axes. The data-parallel size follows from the world size."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    """Default: as tp."""
    replicate: int = 1
    """Replicas of the optimizer state (HSDP); 1 shards it over all ranks with the same weights."""

    def dp(self, world_size: int) -> int:
        """Raises ConfigError when the axes do not divide the world."""
        shared = self.tp * self.cp * self.pp
        if world_size % shared:
            raise ConfigError(
                f"tensor_model_parallel_size={self.tp} x context_parallel_size={self.cp} x "
                f"pipeline_model_parallel_size={self.pp} = {shared} does not divide the {world_size} processes; "
                f"their product can be {listed([n for n in range(1, world_size + 1) if world_size % n == 0])}"
            )
        return world_size // shared

    def edp(self, world_size: int) -> int:
        """Raises ConfigError when the expert axes do not divide a pipeline stage."""
        stage = world_size // self.pp
        shared = self.expert_tp * self.ep
        if stage % shared:
            raise ConfigError(
                f"expert_tensor_parallel_size={self.expert_tp} x expert_model_parallel_size={self.ep} = {shared} "
                f"does not divide the {stage} processes of a pipeline stage; their product can be "
                f"{listed([n for n in range(1, stage + 1) if stage % n == 0])}"
            )
        return stage // shared

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp


@dataclass(frozen=True)
class ParallelContext:
    """Device, dtype of the weights, and this process's rank on every axis.

    There is no global context: one process may use several, for different models. The default is a single process.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    params_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    """Between tensor-parallel regions activations are sharded along the sequence."""
    axes: Mapping[AxisName, Axis] = field(default_factory=dict)
    tp_comm_overlap: bool = False
    """With sequence parallelism, products of tensor-parallel layers are computed in parts while the gather or
    reduce-scatter is under way."""

    def axis(self, name: AxisName) -> Axis:
        return self.axes.get(name, SINGLE)

    @property
    def tp(self) -> Axis:
        return self.axis("tp")

    @property
    def cp(self) -> Axis:
        return self.axis("cp")

    @property
    def dp(self) -> Axis:
        return self.axis("dp")

    @property
    def pp(self) -> Axis:
        return self.axis("pp")

    @property
    def ep(self) -> Axis:
        return self.axis("ep")

    @property
    def dp_cp(self) -> Axis:
        return self.axis("dp_cp")

    @property
    def world(self) -> Axis:
        return self.axis("world")

    @property
    def is_writer(self) -> bool:
        """Whether this process is rank 0 of the world, which writes files for all of them."""
        return is_writer()


def is_writer() -> bool:
    """Whether this process is rank 0, which prints and writes files for the whole world."""
    return not dist.is_initialized() or dist.get_rank() == 0


def wait_for_all() -> None:
    """Barrier over the world."""
    if dist.is_initialized():
        dist.barrier()


SINGLE = Axis()


def waiting(axis: Axis) -> AbstractContextManager[object]:
    """Context manager around a collective that blocks the host: its time is counted (`Axis.waited`)."""
    # A clock would end the graph that torch.compile traces.
    return nullcontext() if torch.compiler.is_compiling() else _counted(axis.waited)


@contextmanager
def _counted(waited: Waited) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        waited.seconds += time.perf_counter() - began


def axis_members(world_size: int, sizes: AxisSizes) -> dict[AxisName, list[tuple[int, ...]]]:
    """Axis -> the groups of global ranks along it, every process in exactly one. Needs no process group."""
    # Row-major: the last name varies fastest. tp is innermost since it communicates most and is to stay inside a node.
    dense = {"pp": sizes.pp, "dp": sizes.dp(world_size), "cp": sizes.cp, "tp": sizes.tp}
    expert = {"pp": sizes.pp, "edp": sizes.edp(world_size), "ep": sizes.ep, "etp": sizes.expert_tp}
    members: dict[AxisName, list[tuple[int, ...]]] = {
        "tp": _groups(dense, "tp"),
        "cp": _groups(dense, "cp"),
        "dp": _groups(dense, "dp"),
        "pp": _groups(dense, "pp"),
        "dp_cp": _groups(dense, "dp", "cp"),
        "model": _groups(dense, "pp", "tp"),
        "etp": _groups(expert, "etp"),
        "ep": _groups(expert, "ep"),
        "edp": _groups(expert, "edp"),
        "world": [tuple(range(world_size))],
    }
    members["shard"], members["replicate"] = _hsdp_axes(members["dp_cp"], sizes.replicate)
    members["expert_shard"], members["expert_replicate"] = _hsdp_axes(members["edp"], sizes.replicate)
    return members


def _hsdp_axes(axes: list[tuple[int, ...]], count: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Splits each axis into `count` blocks of consecutive ranks, and the ranks with the same index in their block."""
    # axes (0 1 2 3 4 5 6 7), count 2: blocks (0 1 2 3) (4 5 6 7) shard the state; (0 4) (1 5) (2 6) (3 7) replicate it.
    # Consecutive ranks are near one another, so the frequent collectives of a block use the faster links.
    size = len(axes[0])
    if size % count:
        raise ConfigError(
            f"parallel.num_distributed_optimizer_instances={count} does not divide the {size} processes that have the "
            f"same weights; it can be {listed([n for n in range(1, size + 1) if size % n == 0])}"
        )
    length = size // count
    runs = [ranks[start : start + length] for ranks in axes for start in range(0, size, length)]
    return runs, [ranks[place::length] for ranks in axes for place in range(length)]


def _groups(grid: Mapping[str, int], *along: str) -> list[tuple[int, ...]]:
    """Ranks of a row-major grid, grouped along some of its dimensions."""
    names = list(grid)
    # [pp, dp, cp, tp], or [pp, edp, ep, etp]
    ranks = torch.arange(math.prod(grid.values())).view(list(grid.values()))
    kept = [names.index(name) for name in names if name not in along]
    chosen = [names.index(name) for name in names if name in along]
    # [groups, ranks of a group]
    rows = ranks.permute(*kept, *chosen).reshape(-1, math.prod(grid[name] for name in along))
    return [tuple(row) for row in rows.tolist()]


def build_parallel_context(
    sizes: AxisSizes,
    *,
    device: torch.device | None = None,
    params_dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    tp_comm_overlap: bool = False,
    communicators: Mapping[str, CommunicatorOptions] | None = None,
    pipeline_backward_communicator: bool = False,
) -> ParallelContext:
    """The context of this process in the initialized world (or of a single process without one).

    communicators: options by axis. pipeline_backward_communicator: gradients between stages have their own.
    Collective: every process of the world calls it, with the same arguments. Raises ConfigError when the axes
    do not fit the world, or for options that the device's communication does not have.
    """
    communicators = communicators or {}
    sharded = sequence_parallel and sizes.tp > 1
    context = ParallelContext(device or torch.device("cpu"), params_dtype, sharded, tp_comm_overlap=tp_comm_overlap)
    # All checks precede the first group: a rank that raised between two of them would leave the others waiting.
    require_device(communicators, context.device)
    members = axis_members(dist.get_world_size() if dist.is_initialized() else 1, sizes)
    stages = members["pp"] if pipeline_backward_communicator else []
    require_several_ranks(communicators, {**members, "pp_backward": stages})
    if not dist.is_initialized():
        return context
    groups = Groups()
    # Every rank creates its groups in the order of `members`, which is the same on all.
    axes = {name: groups.axis(members[name], communicators.get(name, DEFAULT)) for name in members}
    # A communicator runs its operations one after another. On one of their own, gradients do not wait for activations
    # whose sender is late.
    if stages:
        axes["pp_backward"] = groups.separate_axis(stages, communicators.get("pp_backward", DEFAULT))
    return replace(context, axes=axes)


class Groups:
    """Process groups of this process, cached by ranks and options: axes with the same ones share a group.

    A process creates only the groups that it belongs to: about a dozen at 16,384 ranks. dist.new_group over the whole
    world would create thousands.
    """

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        # An axis over the whole world reuses its communicator, which saves the memory of a second one on each GPU.
        self._made = {(tuple(range(dist.get_world_size())), DEFAULT): dist.group.WORLD}

    def axis(self, members: Iterable[tuple[int, ...]], options: CommunicatorOptions = DEFAULT) -> Axis:
        """This process's axis of a partition of the world. Collective: every process gives the same partition."""
        return _axis(members, lambda ranks: self._of(ranks, options))

    def separate_axis(self, members: Iterable[tuple[int, ...]], options: CommunicatorOptions = DEFAULT) -> Axis:
        """The same with a group that no other axis shares."""
        return _axis(members, lambda ranks: new_group(ranks, options))

    def _of(self, ranks: tuple[int, ...], options: CommunicatorOptions) -> dist.ProcessGroup:
        if (ranks, options) not in self._made:
            self._made[ranks, options] = new_group(ranks, options)
        return self._made[ranks, options]


def _axis(members: Iterable[tuple[int, ...]], group_of: Callable[[tuple[int, ...]], dist.ProcessGroup]) -> Axis:
    rank = dist.get_rank()
    # All groups of a partition are of one size. So either every process makes a group here or none does.
    group = next(ranks for ranks in members if rank in ranks)
    return Axis(len(group), group.index(rank), group_of(group) if len(group) > 1 else None, group)


def new_group(ranks: Sequence[int], options: CommunicatorOptions = DEFAULT) -> dist.ProcessGroup:
    """The group of these ranks, of which this process is one. Collective over the world: where NCCL's communicators
    are split from the world's, every process makes a group of one partition of it, if only of itself."""
    assert dist.group.WORLD is not None
    arguments = group_arguments(options, dist.group.WORLD)
    # With local synchronization only the members take part in the creation.
    group = dist.new_group(list(ranks), use_local_synchronization=True, **arguments)
    assert isinstance(group, dist.ProcessGroup)
    return group
