"""Where ranks stand: against the numbering written out, and against collectives over the groups."""

from __future__ import annotations

import multiprocessing
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mt_core import testing
from mt_core.errors import ConfigError
from mt_core.parallel.context import AxisSizes, axis_members, build_parallel_context
from mt_core.testing import RankFailureError, run_ranks

pytestmark = pytest.mark.dist


def test_the_numbering_of_sixteen_ranks() -> None:
    """TP 2, CP 2, PP 2 in 16 processes leave DP 2; tensor parallel is fastest, the pipeline slowest."""
    members = axis_members(16, AxisSizes(tp=2, cp=2, pp=2))
    assert members["tp"][:2] == [(0, 1), (2, 3)]
    assert members["cp"][:2] == [(0, 2), (1, 3)]
    assert members["dp"][:2] == [(0, 4), (1, 5)]
    assert members["pp"][:2] == [(0, 8), (1, 9)]
    assert members["dp_cp"][0] == (0, 2, 4, 6)
    assert members["model"][0] == (0, 1, 8, 9)


def test_experts_fold_the_same_processes_another_way() -> None:
    members = axis_members(8, AxisSizes(tp=4, ep=4, etp=1))
    assert members["ep"] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert members["edp"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert members["etp"] == [(rank,) for rank in range(8)]


@given(*[st.sampled_from([1, 2, 3]) for _ in range(5)])
def test_every_axis_puts_each_rank_in_one_group(tp, cp, pp, dp, ep) -> None:
    world = tp * cp * pp * dp * ep
    for groups in axis_members(world, AxisSizes(tp=tp, cp=cp, pp=pp, ep=ep, etp=1)).values():
        assert sorted(rank for group in groups for rank in group) == list(range(world))


def sums_along_axes(rank: int, world: int) -> dict[str, float]:
    context = build_parallel_context(AxisSizes(tp=2, pp=2))
    other = build_parallel_context(AxisSizes(cp=4))  # a second context in the same process
    sums = {}
    for name, axis in [("tp", context.tp), ("dp", context.dp), ("pp", context.pp), ("cp", other.cp)]:
        value = torch.tensor(float(rank))
        if axis.group is not None:
            dist.all_reduce(value, group=axis.group)
        sums[name] = value.item()
        assert axis.ranks[axis.rank] == rank
    return sums


def test_groups_reach_the_ranks_they_name() -> None:
    sums = run_ranks(4, sums_along_axes)
    assert [s["tp"] for s in sums] == [1, 1, 5, 5]
    assert [s["pp"] for s in sums] == [2, 4, 2, 4]
    assert [s["dp"] for s in sums] == [0, 1, 2, 3]
    assert [s["cp"] for s in sums] == [6, 6, 6, 6]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (AxisSizes(tp=3), "tensor_model_parallel_size=3 .*= 3 does not divide the 8 processes; .* can be 1, 2, 4 or 8"),
        (AxisSizes(pp=8, ep=2), "expert_model_parallel_size=2 = 2 does not divide the 1 processes of a pipeline stage"),
    ],
)
def test_axes_that_do_not_fit_name_what_would(sizes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        axis_members(8, sizes)


def fails_on_rank_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("out of paper")
    dist.barrier()


def test_a_failing_rank_ends_all_with_its_traceback() -> None:
    with pytest.raises(RankFailureError, match=r"(?s)rank 1 failed.*ValueError: out of paper"):
        run_ranks(3, fails_on_rank_one)


def test_the_time_limit_is_of_all_ranks_together(monkeypatch) -> None:
    """Of three ranks the first two need 40 s each, by a clock that stands still otherwise."""
    receivers, senders = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(3)), strict=True)
    clock, waits = [0.0], []

    def waited(open_, timeout):
        waits.append(timeout)
        clock[0] += min(40.0, timeout)
        return open_[:1] if timeout >= 40 else []

    monkeypatch.setattr(testing, "wait", waited)
    monkeypatch.setattr(testing, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for sender in senders:
        sender.send_bytes(pickle.dumps(("result", 0)))
    with pytest.raises(TimeoutError, match=r"ranks \[2\] of 3 are still busy after 100 s"):
        testing._collect(receivers, 100.0)
    assert waits == [100.0, 60.0, 20.0]
