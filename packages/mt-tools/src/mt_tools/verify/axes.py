"""The number of processes of a small run, and its layout over them."""

from __future__ import annotations

from typing import Any

from mt_core.config.checks import smallest_world
from mt_core.config.schema import ParallelConfig

LARGEST_WORLD = 8
AXES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
MANY_BUCKETS = 5000
"""Elements per gradient bucket, small enough that a small model has several."""


def processes(parallel: ParallelConfig) -> int:
    """Ranks of a small run: one copy of the model, or two if copies share work, per distributed optimizer
    instance, as far as LARGEST_WORLD allows."""
    needed = smallest_world(parallel)
    # Two copies at least, so that a mistake in the reduction of gradients shows.
    return needed * min(2 * parallel.num_distributed_optimizer_instances, LARGEST_WORLD // needed)


def copies(parallel: ParallelConfig, world: int) -> int:
    """Of the model, on `world` processes."""
    model = parallel.tensor_model_parallel_size * parallel.context_parallel_size * parallel.pipeline_model_parallel_size
    return world // model


def shrink_axes(parallel: ParallelConfig) -> ParallelConfig:
    """The same axes, the widest halved until the model fits on LARGEST_WORLD processes. None becomes 1."""
    small = _fitting(parallel)
    changes: dict[str, Any] = {"ddp_bucket_size": MANY_BUCKETS}
    if small.hierarchical_context_parallel_sizes is not None:
        # An inner axis of 2, so that both kinds of communication take place.
        size = small.context_parallel_size
        changes["hierarchical_context_parallel_sizes"] = (2, size // 2) if size % 2 == 0 else (1, size)
    instances = min(small.num_distributed_optimizer_instances, 2)
    kept = small.model_copy(update={"num_distributed_optimizer_instances": instances})
    changes["num_distributed_optimizer_instances"] = instances if _shares_within_instances(kept) else 1
    return small.model_copy(update=changes)


def _fitting(parallel: ParallelConfig) -> ParallelConfig:
    while smallest_world(parallel) > LARGEST_WORLD:
        sizes = {axis: getattr(parallel, axis) or 1 for axis in AXES}
        widest = max(sizes, key=lambda axis: sizes[axis])
        # Rounded up: an axis of 3 becomes 2, and none that was used becomes 1 while another is wider.
        parallel = parallel.model_copy(update={widest: (sizes[widest] + 1) // 2})
    return parallel


def _shares_within_instances(parallel: ParallelConfig) -> bool:
    """Whether each distributed optimizer instance has at least two ranks to shard its state."""
    count, stages = parallel.num_distributed_optimizer_instances, parallel.pipeline_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    ranks_of_stage = processes(parallel) // stages
    copies = ranks_of_stage // parallel.tensor_model_parallel_size
    copies_of_experts = ranks_of_stage // (parallel.expert_model_parallel_size * expert_tp)
    return copies % count == 0 and copies_of_experts % count == 0 and copies // count >= 2
