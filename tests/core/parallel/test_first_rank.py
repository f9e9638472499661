"""What the first rank does for all: every rank gets its result, or ends with its error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from mt_core.checkpoint_specs import Fragment
from mt_core.errors import CheckpointError
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.parallel.first_rank import on_first_rank
from mt_core.tensor_slice import TensorSlice
from mt_core.testing import run_ranks
from mt_core.train.checkpoint import saving
from mt_core.train.checkpoint.saving import (
    AsyncCheckpointWriter,
    CheckpointContents,
    ShardedMethod,
    SyncCheckpointWriter,
    WholeMethod,
)
from mt_core.train.step.batches import broadcast_batches


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


class FailsOnTheSecond:
    """A sharded saver whose first rank waits for a report of the second, which never comes."""

    def __init__(self) -> None:
        self.report = threading.Event()

    def begin(self, path: Path) -> str:
        return ""

    def write(self, path: Path, place: str, rank: int, *rest: object) -> None:
        if rank == 1:
            raise CheckpointError(f"{path}: no space for a report")
        self.report.wait()


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
    whole = SyncCheckpointWriter(WholeMethod(FullDisk().save, cast(Any, None), ctx), ctx.world)
    shards = CheckpointContents([shard(name, rank, world) for name in "abc"], {}, {})
    batches = (fails() for _ in range(1)) if rank == 0 else None
    return [
        raised(lambda: on_first_rank(lambda: f"of rank {rank}", ctx.world)),
        raised(lambda: on_first_rank(fails, ctx.world)),
        raised(lambda: method.begin(Path("x"), CheckpointContents([], {}, {}))),
        raised(lambda: whole.write(Path("y"), shards)),
        raised(lambda: next(broadcast_batches(cast(Any, batches), ctx.world))),
    ]


def test_results_and_errors_of_the_first_rank_are_those_of_all() -> None:
    first, second = run_ranks(2, outcomes)
    own, sent = "UnpicklableError: a and b", "RuntimeError: rank 0 failed: UnpicklableError: a and b"
    refused = ["CheckpointError: x: no space", "CheckpointError: y: no space"]
    assert first == ["of rank 0", own, *refused, own]
    assert second == ["of rank 0", sent, *refused, sent]


def of_threads(rank: int, world: int) -> list[str]:
    """Errors of checkpoints written in the background."""
    ctx = build_parallel_context(AxisSizes(tp=world))
    contents = CheckpointContents([shard(name, rank, world) for name in "abc"], {}, {})
    first = AsyncCheckpointWriter(WholeMethod(FullDisk().save, cast(Any, None), ctx), 1, ctx)
    first.write(Path("x"), contents)
    saver = FailsOnTheSecond()
    second = AsyncCheckpointWriter(ShardedMethod(cast(Any, saver), cast(Any, lambda *_: None), ctx), 1, ctx)
    second.write(Path("y"), contents)
    with mock.patch.object(saving, "ROUND_SECONDS", 0.01):
        found = [raised(lambda: first.write(Path("z"), contents)), raised(second.finish)]
    # The first rank's thread still waits for a report that the other one could not leave.
    return [*found, *first.close(), *second.close()]


def test_an_error_of_any_ranks_thread_is_raised_on_all() -> None:
    errors = ["CheckpointError: x: no space", "CheckpointError: y: no space for a report"]
    assert run_ranks(2, of_threads) == [errors, errors]
