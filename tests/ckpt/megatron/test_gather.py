"""`ParameterLayout.gather` puts together what `to_local` cuts."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from mt_core.nn.layout import ParameterLayout, Split, zeros
from mt_core.parallel.context import Axis, ParallelContext


def context(**ranks: tuple[int, int]) -> ParallelContext:
    """axis -> (size, rank)"""
    return ParallelContext(axes={name: Axis(size, rank) for name, (size, rank) in ranks.items()})


@pytest.mark.parametrize(
    ("shape", "splits", "padded", "sizes"),
    [
        ((8, 3), (), {}, {}),
        ((8, 3), (Split(0, "tp"),), {}, {"tp": 4}),
        ((3, 8), (Split(1, "tp", sections=2),), {}, {"tp": 2}),
        ((5, 3), (Split(0, "tp"),), {0: 8}, {"tp": 2}),
        ((4, 8, 3), (Split(0, "ep"), Split(1, "etp", sections=2)), {}, {"ep": 2, "etp": 2}),
        ((4, 3, 8), (Split(0, "ep"), Split(2, "etp")), {}, {"ep": 4, "etp": 2}),
    ],
)
def test_there_and_back(shape, splits, padded, sizes) -> None:
    layout = ParameterLayout(shape, zeros, splits, padded=padded)
    whole = torch.randn(shape)
    axes = [split.axis for split in splits]
    pieces = []
    for ranks in product(*(range(sizes[axis]) for axis in axes)):
        ctx = context(**{axis: (sizes[axis], rank) for axis, rank in zip(axes, ranks, strict=True)})
        pieces.append(layout.to_local(whole, ctx))
        assert tuple(pieces[-1].shape) == layout.local_shape(ctx)
    together = layout.gather(pieces, context(**{axis: (sizes[axis], 0) for axis in axes}))
    assert torch.equal(together, whole)


def test_gate_and_up_rows_by_hand() -> None:
    """Rows g0 g1 u0 u1: rank 0 has g0 u0, rank 1 has g1 u1."""
    layout = ParameterLayout((4,), zeros, (Split(0, "tp", sections=2),))
    rows = torch.tensor([10.0, 11.0, 20.0, 21.0])
    pieces = [torch.tensor([10.0, 20.0]), torch.tensor([11.0, 21.0])]
    assert torch.equal(layout.gather(pieces, context(tp=(2, 0))), rows)
