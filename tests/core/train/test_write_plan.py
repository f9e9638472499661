"""Which rank writes what."""

from __future__ import annotations

import pytest
import torch

from mt_core.checkpoint_specs import Fragment
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.tensor_slice import TensorSlice
from mt_core.testing import run_ranks
from mt_core.train.checkpoint.local_shards import whole_fragment
from mt_core.train.checkpoint.write_plan import WriteItem, WritePlan, collect, share_out


def claim(name: str, start: int, size: int, whole: int) -> WriteItem:
    return WriteItem(name, (whole,), torch.float32, TensorSlice((start,), (size,)))


def test_everything_once_and_shared_evenly() -> None:
    copies = [claim(f"copy{number}", 0, 10, 10) for number in range(8)]
    everyone = [[claim("own", 40 * rank, 40, 80), *copies] for rank in range(2)]
    shares = share_out(everyone)
    assert [len(share) for share in shares] == [5, 5]
    assert all(0 in share for share in shares)
    assert sorted(number for share in shares for number in share if number) == list(range(1, 9))


def test_who_has_more_of_its_own_takes_less_of_the_common() -> None:
    copies = [claim(f"copy{number}", 0, 10, 10) for number in range(5)]
    first, second = share_out([[claim("large", 0, 30, 30), *copies], copies])
    assert len(first) == 2  # 40 elements, and 40 on the other
    assert len(second) == 4


def test_a_hole_is_noticed() -> None:
    with pytest.raises(AssertionError, match="w: ranks hold 30 of 40 elements"):
        share_out([[claim("w", 0, 10, 40)], [claim("w", 20, 20, 40)]])


def context(world: int) -> ParallelContext:
    return build_parallel_context(AxisSizes(tp=world))


def held_by(rank: int, names: str) -> list[Fragment]:
    """Rows `rank` of a matrix, a vector that all have, and, on the last rank alone, something more."""
    row = torch.full((1, 3), float(rank))
    rows = Fragment(
        name="rows", shape=(2, 3), dtype=row.dtype, tensor_slice=TensorSlice((rank, 0), (1, 3)), tensor=lambda: row
    )
    more = [whole_fragment("more", torch.tensor(7))] if rank == 1 else []
    return [rows, *(whole_fragment(name, torch.arange(4.0)) for name in names), *more]


def collected(rank: int, world: int) -> dict[str, torch.Tensor]:
    return dict(collect(held_by(rank, "v"), context(world)))


def test_whole_tensors_are_put_together_on_the_first_rank() -> None:
    first, second = run_ranks(2, collected)
    assert first["rows"].tolist() == [[0.0] * 3, [1.0] * 3]
    assert first["v"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert first["more"].item() == 7
    assert all(tensor.numel() == 0 for tensor in second.values())


def shares(rank: int, world: int) -> list[list[str]]:
    plan, ctx = WritePlan(), context(world)
    return [[fragment.name for fragment in plan.share(held_by(rank, names), ctx)] for names in ("v", "v", "vw")]


def test_the_plan_follows_what_ranks_hold() -> None:
    """Asked again it is the same; when there is more to write, it is made anew."""
    first, second = run_ranks(2, shares)
    assert first[0] == first[1]
    assert second[0] == second[1]
    for one, other, expected in zip(first, second, ("v", "v", "vw"), strict=True):
        assert sorted([*one, *other]) == sorted(["rows", "rows", "more", *expected])
