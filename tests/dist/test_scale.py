"""What one rank of 16,384 makes, on the fake backend: process groups, and connections on a real one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mt_core.launch.process_group import LAZY_GLOO
from mt_core.nn.context_parallel.core import build_hierarchical_axes
from mt_core.optim.finalize_grads import find_tied_weights
from mt_core.parallel.context import AxisSizes, axis_members, build_parallel_context
from mt_core.testing import run_ranks

pytestmark = pytest.mark.dist

WORLD, RANK = 16384, 9000
SIZES = AxisSizes(tp=8, cp=4, pp=16, ep=8, etp=1, replicate=2)


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ranks of each group that is made, also of those that this process is not in."""
    groups: list[list[int]] = []
    new_group = dist.new_group

    def recording(ranks: Any = None, **options: Any) -> Any:
        groups.append(list(ranks))
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", recording)
    return groups


def tied_embedding(everyone: list[Any], own: list[str], group: Any) -> None:
    """Names of the parameters of all pipeline stages."""
    everyone[:] = [[f"layer {stage}"] for stage in range(len(everyone))]
    # As with tied embeddings: the first and the last stage have the same weight.
    everyone[0] = everyone[-1] = ["embedding"]


@pytest.mark.slow
def test_a_rank_of_16384_makes_only_groups_that_it_is_in(made: list[list[int]], monkeypatch) -> None:
    monkeypatch.setattr(dist, "all_gather_object", tied_embedding)
    with fake_rank(RANK, WORLD):
        ctx = build_parallel_context(SIZES)
        build_hierarchical_axes(axis_members(WORLD, SIZES)["cp"], (2, 2))
        copies = find_tied_weights(["layer 8"], ctx)
    assert all(RANK in ranks for ranks in made)
    assert len(made) <= 20
    assert not copies.axes  # rank 9000 stands in the middle of its pipeline
    for name, axis in ctx.axes.items():
        assert axis.ranks == next(ranks for ranks in axis_members(WORLD, SIZES)[name] if RANK in ranks)
        assert (axis.group is None) == (axis.size == 1)


def test_weights_of_the_first_and_last_stage_are_summed_over_their_two_ranks(
    made: list[list[int]], monkeypatch
) -> None:
    monkeypatch.setattr(dist, "all_gather_object", tied_embedding)
    with fake_rank(WORLD - 1, WORLD):
        copies = find_tied_weights(["embedding"], build_parallel_context(SIZES))
    assert copies.axes["embedding"].ranks == (WORLD // 16 - 1, WORLD - 1) == tuple(made[-1])


def test_axes_with_the_same_ranks_share_a_group(made: list[list[int]]) -> None:
    with fake_rank(1, 8):
        ctx = build_parallel_context(AxisSizes(tp=2))
    # Rank 1 of 8 with tp=2: its tensor-parallel group and its data-parallel group; axes of the same ranks (dp_cp,
    # expert_shard) reuse them, and the world is the default group.
    assert made == [[0, 1], [1, 3, 5, 7]]
    assert ctx.axis("etp").group is ctx.tp.group is not None
    assert ctx.axis("dp_cp").group is ctx.dp.group is ctx.axis("expert_shard").group
    assert ctx.world.group is not None


def sockets() -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


def connections(rank: int, world: int) -> tuple[int, int]:
    """Sockets that a new group opens, and that a sum over it opens then."""
    os.environ[LAZY_GLOO] = "1"
    before = sockets()
    group = dist.new_group(list(range(world)))
    made = sockets()
    dist.barrier()  # of the world, which is connected: no communication over the new group before all have counted
    dist.all_reduce(torch.ones(1), group=group)
    return made - before, sockets() - made


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts sockets in /proc")
def test_ranks_connect_to_those_that_they_talk_to() -> None:
    """Not to all of the world: of 6 ranks each one has two neighbors in a ring (and listens on one socket)."""
    found = run_ranks(6, connections)
    assert max(made for made, _ in found) <= 1
    assert all(opened <= 2 for _, opened in found)
