"""Canonical tensors and the slices that ranks hold of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mt_core.nn.embedding import VocabParallelEmbedding, padded_vocab_size
from mt_core.nn.layout import (
    LayoutModule,
    ParameterLayout,
    Split,
    initialize,
    normal,
    parameter_layouts,
    zeros,
)
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.context import Axis, ParallelContext


def contexts(size: int) -> list[ParallelContext]:
    return [ParallelContext(axes={"tp": Axis(size, rank)}) for rank in range(size)]


def test_a_gated_matrix_gives_each_rank_its_share_of_gate_and_of_up() -> None:
    layout = ParameterLayout((8, 1), zeros, (Split(0, "tp", sections=2),))
    full = torch.arange(8.0)[:, None]
    first, second = (layout.to_local(full, ctx)[:, 0].tolist() for ctx in contexts(2))
    assert first == [0, 1, 4, 5]
    assert second == [2, 3, 6, 7]


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([0, 1]), st.integers(1, 3))
def test_slices_of_all_ranks_are_the_whole(size, sections, dim, unit) -> None:
    shape = (size * sections * unit, size * sections * unit)
    layout = ParameterLayout(shape, zeros, (Split(dim, "tp", sections),))
    full = torch.randn(shape)
    slices = [layout.to_local(full, ctx) for ctx in contexts(size)]
    assert all(tuple(part.shape) == layout.local_shape(ctx) for part, ctx in zip(slices, contexts(size), strict=True))
    blocks = [torch.cat(parts, dim) for parts in zip(*(part.chunk(sections, dim) for part in slices), strict=True)]
    assert torch.equal(torch.cat(blocks, dim), full)


@pytest.mark.parametrize(
    ("vocab_size", "divisible_by", "tensor_parallel", "padded"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (30522, 128, 1, 30592),
        (250, 128, 1, 256),
        (1, 1, 1, 1),
        (131072, 128, 8, 131072),
        (100, 7, 3, 105),
    ],
)
def test_the_vocabulary_is_padded_as_by_megatron(vocab_size, divisible_by, tensor_parallel, padded) -> None:
    assert padded_vocab_size(vocab_size, divisible_by * tensor_parallel) == padded


def test_padding_is_zero_in_memory_and_absent_from_the_canonical_tensor() -> None:
    ctx = ParallelContext()
    layer = VocabParallelEmbedding(5, 3, ctx, init=normal(1.0), divisible_by=4)
    initialize(layer, 0, ctx)
    assert layer.weight.shape == (8, 3)
    assert not layer.weight[5:].any()
    assert layer.layouts["weight"].to_canonical(layer.weight).shape == (5, 3)


def test_initial_weights_do_not_depend_on_the_layout_or_the_order_of_layers() -> None:
    def build(ctx: ParallelContext, names: list[str]) -> torch.nn.Module:
        layers = {name: ColumnParallelLinear(4, 8, ctx, bias=False, init=normal(1.0)) for name in names}
        model = torch.nn.ModuleDict(layers)
        initialize(model, 7, ctx)
        return model

    whole = build(ParallelContext(), ["a", "b"])
    parts = [build(ctx, ["b", "a"]) for ctx in contexts(2)]
    for name in ("a", "b"):
        assert torch.equal(torch.cat([part[name].weight for part in parts]), whole[name].weight)
    assert not torch.equal(whole["a"].weight, whole["b"].weight)


def test_the_seed_changes_the_weights() -> None:
    ctx = ParallelContext()
    layer = ColumnParallelLinear(4, 8, ctx, bias=False, init=normal(1.0))
    initialize(layer, 1, ctx)
    before = layer.weight.clone()
    initialize(layer, 2, ctx)
    assert not torch.equal(before, layer.weight)


def test_a_parameter_without_a_layout_is_refused_by_name() -> None:
    class Careless(LayoutModule):
        def __init__(self) -> None:
            super().__init__(ParallelContext())
            self.loose = torch.nn.Parameter(torch.zeros(1))

    with pytest.raises(ValueError, match="loose has no layout"):
        parameter_layouts(Careless())
