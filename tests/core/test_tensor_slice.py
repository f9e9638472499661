"""Boxes of tensors, against the slices and cuts that they describe."""

from __future__ import annotations

import math
import random

import pytest
import torch

from mt_core.nn.layout import ParameterLayout, Split, zeros
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.tensor_slice import TensorSlice, slices_of_range


@pytest.mark.parametrize("seed", range(40))
def test_a_run_of_elements_is_its_boxes_in_order(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 4)))
    count = math.prod(shape)
    tensor = torch.arange(count).reshape(shape)
    first = draw.randint(0, count)
    last = draw.randint(first, count)
    slices = list(slices_of_range(shape, first, last))
    found = (
        torch.cat([tensor[tensor_slice.slices].reshape(-1) for tensor_slice in slices]) if slices else torch.arange(0)
    )
    assert found.tolist() == list(range(first, last))
    assert len(slices) <= max(2 * len(shape) - 1, 1)


def test_rows_of_a_matrix_by_hand() -> None:
    assert list(slices_of_range((4, 5), 3, 17)) == [
        TensorSlice((0, 3), (1, 2)),
        TensorSlice((1, 0), (2, 5)),
        TensorSlice((3, 0), (1, 2)),
    ]
    assert list(slices_of_range((4, 5), 6, 8)) == [TensorSlice((1, 1), (1, 2))]
    assert list(slices_of_range((4, 5), 0, 20)) == [TensorSlice((0, 0), (4, 5))]
    assert list(slices_of_range((7,), 2, 5)) == [TensorSlice((2,), (3,))]
    assert list(slices_of_range((3, 0), 0, 0)) == []


def test_meeting() -> None:
    tensor_slice = TensorSlice((1, 2), (3, 4))
    assert tensor_slice.meet(TensorSlice((2, 0), (9, 3))) == TensorSlice((2, 2), (2, 1))
    assert tensor_slice.meet(TensorSlice((4, 0), (1, 9))) is None
    assert tensor_slice.meet(TensorSlice((0, 0), (9, 0))) is None
    assert TensorSlice((), ()).meet(TensorSlice((), ())) == TensorSlice((), ())
    assert tensor_slice.relative_to((1, 1)) == TensorSlice((0, 1), (3, 4))
    assert tensor_slice.relative_to((1, 1)).placed_at((1, 1)) == tensor_slice
    assert tensor_slice.is_inside((4, 6))
    assert not tensor_slice.is_inside((4, 5))
    assert not tensor_slice.is_inside((4, 6, 1))


class Places(ParallelContext):
    """A context whose axes have no processes behind them."""

    def __init__(self, **axes: Axis) -> None:
        self.given = axes

    def axis(self, name: str) -> Axis:
        return self.given.get(name, Axis())


LAYOUTS = [
    ParameterLayout((6,), zeros),
    ParameterLayout((), zeros),
    ParameterLayout((8, 6), zeros, (Split(0, "tp"),)),
    ParameterLayout((8, 6), zeros, (Split(1, "tp"),)),
    ParameterLayout((12, 2), zeros, (Split(0, "tp", 3),)),
    ParameterLayout((14, 3), zeros, (Split(0, "tp", (8, 4, 2)),)),
    ParameterLayout((13, 4), zeros, (Split(0, "tp"),), padded={0: 16}),
    ParameterLayout((5, 4), zeros, (Split(0, "tp"),), padded={0: 16}),
    ParameterLayout((6, 8, 4), zeros, (Split(0, "ep"), Split(1, "etp", 2))),
    ParameterLayout((16, 4), zeros, (Split(0, "ep"), Split(0, "etp", 2))),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.shape}-{len(layout.splits)}")
def test_patches_are_what_to_local_cuts(layout: ParameterLayout) -> None:
    """Copied slice by slice, a canonical tensor becomes each rank's local one, and together they have all of it."""
    canonical = 1 + torch.arange(float(math.prod(layout.shape))).reshape(layout.shape)
    seen = torch.zeros(layout.shape)
    for rank in range(2):
        for other in range(2):
            places = Places(tp=Axis(2, rank), ep=Axis(2, rank), etp=Axis(2, other))
            if other and not any(split.axis == "etp" for split in layout.splits):
                continue
            local = torch.zeros(layout.local_shape(places))
            for region in layout.regions(places):
                target = TensorSlice(region.local, region.canonical.shape)
                assert not local[target.slices].any()  # nothing twice
                local[target.slices] = canonical[region.canonical.slices]
                seen[region.canonical.slices] += 1
            assert torch.equal(local, layout.to_local(canonical, places))
    copies = 1 if layout.splits else 2
    assert torch.equal(seen, torch.full(layout.shape, float(copies)))
