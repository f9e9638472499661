"""The rows of each parameter that FSDP gives a rank, where ranks do not divide them evenly."""

from __future__ import annotations

import pytest
import torch

from mt_core.nn.layout import LayoutModule, ParameterLayout, zeros
from mt_core.optim.fully_sharded_weights import FullyShardedWeights, ShardOptions
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.testing import run_ranks

ROWS = (1, 3, 4, 5, 6, 7, 9)


class Tables(LayoutModule):
    """Matrices [rows, 2] whose elements are 0, 1, 2 ..."""

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        for rows in ROWS:
            self.declare(str(rows), ParameterLayout((rows, 2), zeros))
            getattr(self, str(rows)).data.copy_(torch.arange(2.0 * rows).view(rows, 2))


def owned_rows(rank: int, world: int) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """By parameter, the first row and the elements of each slice of this rank."""
    ctx = build_parallel_context(AxisSizes())
    weights = FullyShardedWeights(Tables(ctx), ctx, ShardOptions())
    found = {}
    for name, _ in weights.named_parameters():
        slices, own = weights.owned_weight(name)
        found[name] = [(part.start[0], own.clone()) for part in slices if own.numel()]
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3, 4])
def test_slices_say_where_the_rows_of_a_rank_are(world) -> None:
    """A checkpoint puts them there: together they are the parameter."""
    ranks = run_ranks(world, owned_rows)
    for rows in ROWS:
        whole = torch.full((rows, 2), torch.nan)
        for first, own in (part for of_rank in ranks for part in of_rank[str(rows)]):
            whole[first : first + len(own)] = own
        assert torch.equal(whole, torch.arange(2.0 * rows).view(rows, 2))
