"""The random streams of a run: dropout draws from torch's own generator, one stream for each part of the work."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.nn.layout import stream_seed
from mt_core.parallel.context import AxisName, ParallelContext
from mt_core.specs import CheckpointReader

RNG = "rng."
PART_OF: dict[AxisName, str] = {
    "dp": "data-parallel rank",
    "cp": "context-parallel rank",
    "pp": "pipeline rank",
    "tp": "tensor-parallel rank",
}


def dropout_stream(ctx: ParallelContext) -> str:
    """The name of this rank's stream: ranks with other samples, positions or layers drop other elements.

    Tensor-parallel ranks repeat the same work between their matrices, so they drop alike, unless they divide the
    sequence there.
    """
    axes: tuple[AxisName, ...] = ("dp", "cp", "pp", "tp") if ctx.sequence_parallel else ("dp", "cp", "pp")
    places = [f"{PART_OF[name]} {ctx.axis(name).rank}" for name in axes if ctx.axis(name).rank]
    return " of ".join(["dropout", *places])


def gather_rng(ctx: ParallelContext) -> dict[str, Tensor]:
    """`rng.<device>.<rank>` -> state, of all ranks of the world; collective."""
    rank = ctx.world.rank
    own = {f"{RNG}cpu.{rank}": torch.get_rng_state()}
    if ctx.device.type == "cuda":
        own[f"{RNG}cuda.{rank}"] = torch.cuda.get_rng_state(ctx.device)
    if ctx.world.size == 1:
        return own
    everyone: list[dict[str, Tensor] | None] = [None] * ctx.world.size
    dist.all_gather_object(everyone, own, group=ctx.world.group)
    return {name: state for states in everyone if states for name, state in states.items()}


def restore_rng(reader: CheckpointReader, ctx: ParallelContext) -> None:
    """Take this rank's streams up again; a rank that the checkpoint did not have starts one of its own."""
    names, rank = reader.shapes(), ctx.world.rank
    if f"{RNG}cpu.{rank}" in names:
        torch.set_rng_state(reader.read(f"{RNG}cpu.{rank}"))
    else:
        torch.manual_seed(stream_seed(int(reader.metadata["iteration"]), dropout_stream(ctx)))
    if ctx.device.type == "cuda" and f"{RNG}cuda.{rank}" in names:
        torch.cuda.set_rng_state(reader.read(f"{RNG}cuda.{rank}"), ctx.device)
