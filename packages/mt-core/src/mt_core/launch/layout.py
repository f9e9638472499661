"""The parallel layout of a planned run: the rank of each process on each axis, and the command for each node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from mt_core.errors import ConfigError
from mt_core.parallel.context import AxisName, AxisSizes, axis_members
from mt_core.wording import counted

COLUMNS: tuple[AxisName, ...] = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
EXPERT_COLUMNS = ("etp", "ep", "edp")
SHOWN_ROWS, SHOWN_GROUPS = 64, 8
SHOWN_NODES = 16


def describe(
    layout: AxisSizes,
    nnodes: int,
    nproc: int,
    *,
    arguments: Sequence[str] = ("train",),
    master: tuple[str | None, int | None] = (None, None),
    device_type: str = "cpu",
) -> str:
    """The table of ranks by axes, the groups of each axis, and the command for each node.

    master: address and port of the first node; FIRST_NODE stands for an address that is None.
    Raises ConfigError when the axes do not fit nnodes * nproc ranks.
    """
    if nnodes < 1 or nproc < 1:
        raise ConfigError(f"--nnodes {nnodes} and --nproc {nproc} must be at least 1")
    members = axis_members(nnodes * nproc, layout)
    columns = [name for name in COLUMNS if name not in EXPERT_COLUMNS or _has_experts_of_its_own(layout)]
    paragraphs = [
        _headline(layout, nnodes, nproc),
        "\n".join(_table(members, columns, nnodes, nproc)),
        "\n".join(_groups(name, members[name]) for name in columns if len(members[name][0]) > 1),
        "\n".join(_commands(nnodes, nproc, arguments, master, device_type)),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def _has_experts_of_its_own(layout: AxisSizes) -> bool:
    """Whether the expert layers have another layout than the dense layers."""
    return layout.ep > 1 or layout.expert_tp != layout.tp


def _headline(layout: AxisSizes, nnodes: int, nproc: int) -> str:
    world = nnodes * nproc
    dense = f"tensor {layout.tp} x context {layout.cp} x data {layout.dp(world)} x pipeline {layout.pp}"
    nodes = "1 node" if nnodes == 1 else f"{nnodes} nodes"
    return f"{counted(world, 'rank')} on {nodes}: {dense}"


def _table(
    members: dict[AxisName, list[tuple[int, ...]]], columns: Sequence[AxisName], nnodes: int, nproc: int
) -> list[str]:
    """One row per rank: its node, its local rank, and its rank on each axis."""
    places = {name: {rank: group.index(rank) for group in members[name] for rank in group} for name in columns}
    rows = [["rank", "node", "local", *columns]]
    shown = range(min(nnodes * nproc, SHOWN_ROWS))
    for rank in shown:
        rows.append([str(n) for n in (rank, rank // nproc, rank % nproc, *(places[name][rank] for name in columns))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    hidden = nnodes * nproc - len(shown)
    return lines + ([f"... and {hidden} more ranks"] if hidden else [])


def _groups(name: str, groups: list[tuple[int, ...]]) -> str:
    """ "tp groups: 0 1 | 2 3"."""
    shown = [" ".join(map(str, group[:SHOWN_GROUPS])) + (" ..." * (len(group) > SHOWN_GROUPS)) for group in groups]
    more = f" | ... ({len(groups)} groups)" if len(groups) > SHOWN_GROUPS else ""
    return f"{name} groups: {' | '.join(shown[:SHOWN_GROUPS])}{more}"


def _commands(
    nnodes: int, nproc: int, arguments: Sequence[str], master: tuple[str | None, int | None], device_type: str
) -> list[str]:
    """For each node the commands with mt and with torchrun; for all nodes the command with srun."""
    address = ["--master-addr", master[0] or "FIRST_NODE", "--master-port", str(master[1] or 29500)]
    lines = []
    for node in range(min(nnodes, SHOWN_NODES)):
        here = ["--nnodes", str(nnodes), "--node-rank", str(node), *address] if nnodes > 1 else []
        lines += [f"on node {node}:" if nnodes > 1 else "here:"]
        lines += ["  " + shlex.join(["mt", *arguments, "--nproc", str(nproc), *here])]
        torchrun = here if nnodes > 1 else ["--standalone"]
        lines += [
            "  " + shlex.join(["torchrun", "--nproc-per-node", str(nproc), *torchrun, "--no-python", "mt", *arguments])
        ]
    if nnodes > SHOWN_NODES:
        lines += [f"... and so on to --node-rank {nnodes - 1}"]
    devices = ["--gpus-per-node", str(nproc)] if device_type == "cuda" else []
    srun = ["srun", "--nodes", str(nnodes), "--ntasks-per-node", str(nproc), *devices, "--kill-on-bad-exit=1"]
    return [*lines, "under Slurm, once:", "  " + shlex.join([*srun, "mt", *arguments])]
