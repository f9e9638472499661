"""The random streams of a run: dropout draws from torch's own, one stream for each data-parallel rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.nn.layout import stream_seed
from mt_core.parallel.context import ParallelContext
from mt_core.specs import CheckpointReader

RNG = "rng."


def dropout_stream(ctx: ParallelContext) -> str:
    """The name of this rank's stream; ranks with other samples drop other positions."""
    return "dropout" if ctx.dp.rank == 0 else f"dropout of data-parallel rank {ctx.dp.rank}"


def gather_rng(ctx: ParallelContext) -> dict[str, Tensor]:
    """`rng.<device>.<data-parallel rank>` -> state, of all ranks; collective."""
    own = {f"{RNG}cpu.{ctx.dp.rank}": torch.get_rng_state()}
    if ctx.device.type == "cuda":
        own[f"{RNG}cuda.{ctx.dp.rank}"] = torch.cuda.get_rng_state(ctx.device)
    if ctx.dp.size == 1:
        return own
    everyone: list[dict[str, Tensor] | None] = [None] * ctx.dp.size
    dist.all_gather_object(everyone, own, group=ctx.dp.group)
    return {name: state for states in everyone if states for name, state in states.items()}


def restore_rng(reader: CheckpointReader, ctx: ParallelContext) -> None:
    """Take this rank's streams up again; a rank that the checkpoint did not have starts one of its own."""
    names = reader.shapes()
    if f"{RNG}cpu.{ctx.dp.rank}" in names:
        torch.set_rng_state(reader.read(f"{RNG}cpu.{ctx.dp.rank}"))
    else:
        torch.manual_seed(stream_seed(int(reader.metadata["iteration"]), dropout_stream(ctx)))
    if ctx.device.type == "cuda" and f"{RNG}cuda.{ctx.dp.rank}" in names:
        torch.cuda.set_rng_state(reader.read(f"{RNG}cuda.{ctx.dp.rank}"), ctx.device)
