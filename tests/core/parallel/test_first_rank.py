"""What the first rank does for all: every rank gets its result, or ends with its error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from mt_core.errors import CheckpointError
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.parallel.first_rank import on_first_rank
from mt_core.testing import run_ranks
from mt_core.train.batches.broadcast import broadcast_batches
from mt_core.train.checkpoint.saving import Contents, ShardedMethod


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class FullDisk:
    """A saver's `begin`."""

    def begin(self, path: Path) -> str:
        raise CheckpointError(f"{path}: no space")


def raised(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fails() -> None:
    raise UnpicklableError("a", "b")


def outcomes(rank: int, world: int) -> list[str]:
    ctx = build_parallel_context(AxisSizes(tp=world))
    method = ShardedMethod(cast(Any, FullDisk()), cast(Any, None), ctx)
    batches = (fails() for _ in range(1)) if rank == 0 else None
    return [
        raised(lambda: on_first_rank(lambda: f"of rank {rank}", ctx.world)),
        raised(lambda: on_first_rank(fails, ctx.world)),
        raised(lambda: method.begin(Path("x"), Contents([], {}, {}))),
        raised(lambda: next(broadcast_batches(cast(Any, batches), ctx.world))),
    ]


def test_results_and_errors_of_the_first_rank_are_those_of_all() -> None:
    first, second = run_ranks(2, outcomes)
    own, sent = "UnpicklableError: a and b", "RuntimeError: the first rank failed: UnpicklableError: a and b"
    assert first == ["of rank 0", own, "CheckpointError: x: no space", own]
    assert second == ["of rank 0", sent, "CheckpointError: x: no space", sent]
