"""Parallel contexts of simulated ranks: the first rank of a pipeline stage, on the meta device."""

from __future__ import annotations

import torch

from mt_core.config.schema import Config
from mt_core.parallel.context import Axis, AxisName, AxisSizes, ParallelContext
from mt_core.train.build import DTYPES, axis_sizes
from mt_tools.plan.ledger import Ledger, RecordingGroup

SHOWN_AS: dict[AxisName, str] = {
    "shard": "dp",
    "replicate": "dp",
    "dp_cp": "dp",
    "expert_shard": "edp",
    "expert_replicate": "edp",
    "cp_inner": "cp",
    "cp_outer": "cp",
}
"""Axes that reports show under another name. `dp` stands for all ranks that reduce gradients, cp included."""


def all_axis_sizes(sizes: AxisSizes, world: int) -> dict[AxisName, int]:
    """The size of every axis. Raises ConfigError if they do not fit the world size."""
    dp, edp = sizes.dp(world), sizes.edp(world)
    return {
        "tp": sizes.tp,
        "cp": sizes.cp,
        "dp": dp,
        "pp": sizes.pp,
        "etp": sizes.expert_tp,
        "ep": sizes.ep,
        "edp": edp,
        "dp_cp": dp * sizes.cp,
        "model": sizes.tp * sizes.pp,
        "shard": dp * sizes.cp // sizes.replicate,
        "replicate": sizes.replicate,
        "expert_shard": edp // sizes.replicate,
        "expert_replicate": sizes.replicate,
        "world": world,
    }


def fake_context(config: Config, world: int, pp_rank: int, ledger: Ledger) -> ParallelContext:
    """The context of pipeline rank `pp_rank`, first on every other axis; its groups record into the ledger."""
    sizes = axis_sizes(config)
    lengths = all_axis_sizes(sizes, world)
    if config.parallel.hierarchical_context_parallel_sizes:
        lengths["cp_inner"], lengths["cp_outer"] = config.parallel.hierarchical_context_parallel_sizes
    return ParallelContext(
        torch.device("meta"),
        DTYPES[config.precision.dtype],
        config.parallel.sequence_parallel and sizes.tp > 1,
        {name: fake_axis(name, size, pp_rank if name == "pp" else 0, ledger) for name, size in lengths.items()},
    )


def fake_axis(name: AxisName, size: int, rank: int, ledger: Ledger) -> Axis:
    """A fake axis of `size` ranks under the name that reports show."""
    # An axis of one rank has no group: the runtime then calls no collective.
    group = RecordingGroup(SHOWN_AS.get(name, name), size, ledger, rank) if size > 1 else None
    return Axis(size, rank, group, tuple(range(size)) if size > 1 else (0,))
