"""Context parallelism: attention over sharded sequences. `docs/context-parallel.md` explains the methods."""

from mt_core.nn.context_parallel.core import (
    Method,
    check_context_parallel,
    check_dropout,
    context_parallel_attention,
)
from mt_core.nn.context_parallel.hierarchical import build_hierarchical_axes, hierarchical_members
from mt_core.nn.context_parallel.zigzag import check_sequence_length, shard_sequence, unshard_sequence

__all__ = [
    "Method",
    "build_hierarchical_axes",
    "check_context_parallel",
    "check_dropout",
    "check_sequence_length",
    "context_parallel_attention",
    "hierarchical_members",
    "shard_sequence",
    "unshard_sequence",
]
