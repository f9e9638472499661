"""`ParallelContext`: where this process stands on every parallel axis, passed explicitly to whatever needs it.

Ranks are numbered with tensor parallel fastest, then context, data, pipeline (Megatron's `tp-cp-ep-dp-pp`):
rank = ((pp * DP + dp) * CP + cp) * TP + tp. Experts see the same processes of a pipeline stage through a
second grid, folded independently of the first: rank = ((pp * EDP + edp) * EP + ep) * ETP + etp.

| axis | processes that |
| --- | --- |
| tp | share each layer's matrices |
| cp | share each sequence |
| dp | have the same weights and other samples |
| pp | hold consecutive stages of layers |
| etp, ep, edp | share an expert's matrices; hold different experts; have the same experts |
| dp_cp | together reduce the gradients of dense weights |
| model | together hold one copy of the model (tp x pp) |
| shard, instances | dp_cp in two: share the optimizer's state; have the same part of it |
| expert_shard, expert_instances | the same of edp |
| world | all processes |
| cp_inner, cp_outer | cp in two, for hierarchical attention |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mt_core.config.checks import listed
from mt_core.errors import ConfigError

AxisName = Literal[
    "tp",
    "cp",
    "dp",
    "pp",
    "etp",
    "ep",
    "edp",
    "dp_cp",
    "model",
    "shard",
    "instances",
    "expert_shard",
    "expert_instances",
    "world",
    "cp_inner",
    "cp_outer",
]


@dataclass(frozen=True)
class Axis:
    """One parallel axis as this process sees it. group is None when the axis has one process."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    ranks: tuple[int, ...] = (0,)
    """Global ranks of the processes on it, by their rank on the axis."""


@dataclass(frozen=True)
class AxisSizes:
    """Sizes of the axes; data parallel takes what the others leave."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    """Default: as tp."""
    instances: int = 1
    """Copies of the optimizer's state among the ranks that could share one."""

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
    """Device, number format of the weights, and this process's place on every axis.

    There is no global one: several contexts live in one process, each with models of its own. The default
    is a single process.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    params_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    """Between tensor-parallel regions activations are divided along the sequence."""
    axes: Mapping[AxisName, Axis] = field(default_factory=dict)
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    """The dense grid, for what torch builds on a mesh; None in a single process."""

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
        """Whether this is the process that writes for all of them."""
        return is_writer()


def is_writer() -> bool:
    """Whether this process is the one that speaks and writes for all of the world."""
    return not dist.is_initialized() or dist.get_rank() == 0


def wait_for_all() -> None:
    """Until every process of the world is here."""
    if dist.is_initialized():
        dist.barrier()


SINGLE = Axis()
DENSE: tuple[AxisName, ...] = ("tp", "cp", "dp", "pp")
EXPERT: tuple[AxisName, ...] = ("etp", "ep", "edp")
COMBINED: tuple[AxisName, ...] = ("dp_cp", "model")
INSTANCES: tuple[AxisName, ...] = ("shard", "instances", "expert_shard", "expert_instances")


def axis_members(world_size: int, sizes: AxisSizes) -> dict[AxisName, list[tuple[int, ...]]]:
    """Axis -> the groups of global ranks along it, every process in exactly one. Needs no process group."""
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
    members["shard"], members["instances"] = _instances(members["dp_cp"], sizes.instances)
    members["expert_shard"], members["expert_instances"] = _instances(members["edp"], sizes.instances)
    return members


def _instances(axes: list[tuple[int, ...]], count: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Each axis cut into `count` runs of neighbours, and the ranks with the same place in their runs."""
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
    ranks = torch.arange(math.prod(grid.values())).view(list(grid.values()))
    kept = [names.index(name) for name in names if name not in along]
    chosen = [names.index(name) for name in names if name in along]
    rows = ranks.permute(*kept, *chosen).reshape(-1, math.prod(grid[name] for name in along))
    return [tuple(row) for row in rows.tolist()]


def build_parallel_context(
    sizes: AxisSizes,
    *,
    device: torch.device | None = None,
    params_dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
) -> ParallelContext:
    """The context of this process in the initialized world (or of a single process without one).

    Collective: every process of the world calls it, with the same sizes. Raises ConfigError when the axes
    do not fit the world.
    """
    device = device or torch.device("cpu")
    context = ParallelContext(device, params_dtype, sequence_parallel and sizes.tp > 1)
    if not dist.is_initialized():
        axis_members(1, sizes)  # only ones fit a single process
        return context
    world = dist.get_world_size()
    members = axis_members(world, sizes)
    dense, expert = build_meshes(sizes, world, device.type)
    # Groups are taken from the meshes by name; slicing a mesh would import torch's compiler, for seconds.
    groups: dict[AxisName, dist.ProcessGroup] = {
        **{name: dense.get_group(name) for name in DENSE},
        **{name: expert.get_group(name) for name in EXPERT},
        **{name: _new_group(members[name]) for name in COMBINED},
    }
    groups["shard"], groups["expert_shard"] = groups["dp_cp"], groups["edp"]
    if sizes.instances > 1:
        groups.update({name: _new_group(members[name]) for name in INSTANCES})
    assert dist.group.WORLD is not None
    groups["world"] = dist.group.WORLD
    axes = {name: _axis(members[name], groups.get(name)) for name in members}
    return replace(context, axes=axes, mesh=dense)


def build_meshes(sizes: AxisSizes, world: int, device_type: str) -> tuple[DeviceMesh, DeviceMesh]:
    """The grid of dense layers (pp, dp, cp, tp) and that of experts (pp, edp, ep, etp), over the same processes."""
    dense = (sizes.pp, sizes.dp(world), sizes.cp, sizes.tp)
    expert = (sizes.pp, sizes.edp(world), sizes.ep, sizes.expert_tp)
    return (
        init_device_mesh(device_type, dense, mesh_dim_names=("pp", "dp", "cp", "tp")),
        init_device_mesh(device_type, expert, mesh_dim_names=("pp", "edp", "ep", "etp")),
    )


def _new_group(members: list[tuple[int, ...]]) -> dist.ProcessGroup:
    """This process's group of a partition of the world; collective."""
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in members])
    assert isinstance(group, dist.ProcessGroup)  # every process is in one of them
    return group


def _axis(members: list[tuple[int, ...]], group: dist.ProcessGroup | None) -> Axis:
    rank = dist.get_rank()
    own = next(ranks for ranks in members if rank in ranks)
    return Axis(len(own), own.index(rank), group if len(own) > 1 else None, own)
