"""States of torch's default generators, which modules from outside mt draw from: one stream per part of the work.

Dropout of `mt_core.nn.dropout` seeds them anew for each sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mt_core.nn.layout import stream_seed
from mt_core.parallel.context import AxisName, ParallelContext
from mt_core.specs import CheckpointReader, Fragment
from mt_core.train.checkpoint.local_shards import whole_fragment

RNG = "rng."
PART_OF: dict[AxisName, str] = {
    "dp": "data-parallel rank",
    "cp": "context-parallel rank",
    "pp": "pipeline rank",
    "tp": "tensor-parallel rank",
}


def dropout_stream(ctx: ParallelContext) -> str:
    """The name of this rank's stream. Ranks with other samples, positions or layers draw from other streams.

    Outside of tensor-parallel regions the tensor-parallel ranks hold the same activations and have to drop the same
    elements; with sequence parallelism they hold different positions and have different streams.
    """
    axes: tuple[AxisName, ...] = ("dp", "cp", "pp", "tp") if ctx.sequence_parallel else ("dp", "cp", "pp")
    # Rank 0 of an axis is left out, so the stream of the first rank has the same name in every layout.
    places = [f"{PART_OF[name]} {ctx.axis(name).rank}" for name in axes if ctx.axis(name).rank]
    return " of ".join(["dropout", *places])


def fragments(ctx: ParallelContext) -> Iterator[Fragment]:
    """`rng.<device>.<rank>`: the RNG states of this rank."""
    rank = ctx.world.rank
    yield whole_fragment(f"{RNG}cpu.{rank}", torch.get_rng_state())
    if ctx.device.type == "cuda":
        yield whole_fragment(f"{RNG}cuda.{rank}", torch.cuda.get_rng_state(ctx.device))


def restore_rng(reader: CheckpointReader, ctx: ParallelContext) -> None:
    """Restore this rank's RNG states. A rank that the checkpoint does not have starts a new stream."""
    names, rank = reader.shapes(), ctx.world.rank
    if f"{RNG}cpu.{rank}" in names:
        torch.set_rng_state(reader.read(f"{RNG}cpu.{rank}"))
    else:
        # A layout with more ranks than the run had. The iteration in the seed keeps it from repeating the masks of the
        # first steps.
        torch.manual_seed(stream_seed(int(reader.metadata["iteration"]), dropout_stream(ctx)))
    if ctx.device.type == "cuda" and f"{RNG}cuda.{rank}" in names:
        torch.cuda.set_rng_state(reader.read(f"{RNG}cuda.{rank}"), ctx.device)
