"""Initial weights: the same for every layout, and drawn in blocks of bounded size."""

from __future__ import annotations

import math

import pytest
import torch

from mt_core.nn import layout as layouts
from mt_core.nn.layout import (
    LayoutModule,
    ParameterLayout,
    Split,
    drawn_blocks,
    initialize,
    normal,
    stream_seed,
)
from mt_core.parallel.context import Axis, ParallelContext

EXPERTS, OUT, IN = 6, 10, 7
SHAPE = (EXPERTS, OUT, IN)
WHOLE = ParameterLayout(SHAPE, normal(0.5), (Split(0, "ep"), Split(1, "etp", sections=2)), padded={0: 8})


def contexts(ep: int, etp: int) -> list[ParallelContext]:
    return [ParallelContext(axes={"ep": Axis(ep, i), "etp": Axis(etp, j)}) for i in range(ep) for j in range(etp)]


def weights(layout: ParameterLayout, ctx: ParallelContext) -> torch.Tensor:
    module = LayoutModule(ctx)
    module.declare("weight", layout)
    initialize(module, 3, ctx)
    return module.get_parameter("weight").detach()


@pytest.mark.parametrize("block", [4 * OUT * IN, 2 * OUT * IN, 30, IN, 3], ids=lambda size: f"blocks of {size}")
def test_ranks_draw_their_blocks_of_what_one_process_draws(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Blocks of several experts, one expert, some rows of one, a row, and a part of a row."""
    monkeypatch.setattr(layouts, "BLOCK_ELEMENTS", block)
    (alone,) = contexts(1, 1)
    parts = [weights(WHOLE, ctx) for ctx in contexts(4, 5)]
    canonical = WHOLE.gather(parts, ParallelContext(axes={"ep": Axis(4), "etp": Axis(5)}))
    assert torch.equal(canonical, WHOLE.to_canonical(weights(WHOLE, alone)))
    assert not weights(WHOLE, alone)[EXPERTS:].any()  # padding
    assert canonical.unique().numel() == canonical.numel()  # no two blocks from one stream


def test_a_tensor_of_one_block_is_drawn_as_a_whole_from_the_stream_of_its_name() -> None:
    """So runs of small models, and what is compared with them, keep their weights."""
    generator = torch.Generator().manual_seed(stream_seed(3, "weight"))
    drawn = torch.empty(SHAPE).normal_(0.0, 0.5, generator=generator)
    (alone,) = contexts(1, 1)
    assert torch.equal(WHOLE.to_canonical(weights(WHOLE, alone)), drawn)


def test_values_that_depend_on_their_place_are_never_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "BLOCK_ELEMENTS", 2)
    counted = ParameterLayout((6,), lambda tensor, generator: tensor.copy_(torch.arange(6.0)))
    assert weights(counted, ParallelContext()).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_rank_of_16384_draws_a_bounded_part_of_the_experts_of_deepseek_v3() -> None:
    """256 experts [4096, 7168] over 64 ranks of 1 to 4 more: 30 GB in fp32, of which a rank holds 0.5 and draws at
    most one block more, a block at a time."""
    shape = (256, 2 * 2048, 7168)
    fc1 = ParameterLayout(shape, normal(0.006), (Split(0, "ep"), Split(1, "etp", sections=2)))
    ctx = ParallelContext(axes={"ep": Axis(64, 63), "etp": Axis(1)})
    sizes = [4 * math.prod(block.shape) for _, block, _ in drawn_blocks(fc1, ctx)]
    held = 4 * math.prod(fc1.local_shape(ctx))
    assert 4 * math.prod(shape) > 30e9
    assert max(sizes) <= 4 * layouts.BLOCK_ELEMENTS
    assert held <= sum(sizes) <= held + 2 * max(sizes) < 1e9
