"""What the first rank does for all: every rank gets its result, or ends with its error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from mt_core.errors import CheckpointError
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.parallel.first_rank import on_first_rank
from mt_core.specs import Fragment
from mt_core.tensor_slice import TensorSlice
from mt_core.testing import run_ranks
from mt_core.train.batches.broadcast import broadcast_batches
from mt_core.train.checkpoint.saving import Contents, ShardedMethod, WholeMethod, WritesNow


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class FullDisk:
    """A sharded saver's `begin`, and a saver of whole tensors that fails after the first."""

    def begin(self, path: Path) -> str:
        raise CheckpointError(f"{path}: no space")

    def save(self, path: Path, tensors: Iterator[tuple[str, Tensor]], *rest: object) -> None:
        next(tensors)
        raise CheckpointError(f"{path}: no space")


def raised(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fails() -> None:
    raise UnpicklableError("a", "b")


def shard(name: str, rank: int, world: int) -> Fragment:
    row = torch.zeros(1, 3)
    own = TensorSlice((rank, 0), (1, 3))
    return Fragment(name=name, shape=(world, 3), dtype=row.dtype, tensor_slice=own, tensor=lambda: row)


def outcomes(rank: int, world: int) -> list[str]:
    ctx = build_parallel_context(AxisSizes(tp=world))
    method = ShardedMethod(cast(Any, FullDisk()), cast(Any, None), ctx)
    whole = WritesNow(WholeMethod(FullDisk().save, cast(Any, None), ctx), ctx.world)
    shards = Contents([shard(name, rank, world) for name in "abc"], {}, {})
    batches = (fails() for _ in range(1)) if rank == 0 else None
    return [
        raised(lambda: on_first_rank(lambda: f"of rank {rank}", ctx.world)),
        raised(lambda: on_first_rank(fails, ctx.world)),
        raised(lambda: method.begin(Path("x"), Contents([], {}, {}))),
        raised(lambda: whole.write(Path("y"), shards)),
        raised(lambda: next(broadcast_batches(cast(Any, batches), ctx.world))),
    ]


def test_results_and_errors_of_the_first_rank_are_those_of_all() -> None:
    first, second = run_ranks(2, outcomes)
    own, sent = "UnpicklableError: a and b", "RuntimeError: the first rank failed: UnpicklableError: a and b"
    refused = ["CheckpointError: x: no space", "CheckpointError: y: no space"]
    assert first == ["of rank 0", own, *refused, own]
    assert second == ["of rank 0", sent, *refused, sent]
