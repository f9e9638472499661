"""The parts of context parallelism that need one process: shards, blocks of attention, heads, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mt_core import _torch_compat
from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionPattern, expand_groups
from mt_core.nn.context_parallel.blocks import FLASH_CPU, MATH, Softmax
from mt_core.nn.context_parallel.core import (
    check_dropout,
    check_hierarchy,
    check_inner_heads,
    check_pattern,
    context_parallel_attention,
    hierarchical_members,
)
from mt_core.nn.context_parallel.masks import BlockMask
from mt_core.nn.context_parallel.ulysses import group_repeats
from mt_core.nn.context_parallel.zigzag import (
    as_shards,
    check_sequence_length,
    in_order,
    shard_positions,
    shard_sequence,
    visible_rows,
)
from mt_core.parallel.context import Axis


def axis(rank: int, size: int) -> Axis:
    return Axis(size, rank, None, tuple(range(size)))


# -- shards ----------------------------------------------------------------------------------------


def test_each_rank_holds_an_early_and_a_late_chunk() -> None:
    tokens = torch.arange(16)
    assert shard_sequence(tokens, 0, axis(0, 4)).tolist() == [0, 1, 14, 15]
    assert shard_sequence(tokens, 0, axis(1, 4)).tolist() == [2, 3, 12, 13]
    assert shard_sequence(tokens, 0, axis(3, 4)).tolist() == [6, 7, 8, 9]


@given(size=st.integers(2, 5), chunk=st.integers(1, 3), dim=st.integers(-3, 2))
def test_shards_end_to_end_are_the_sequence_in_another_order(size, chunk, dim) -> None:
    shape = [2, 3, 4]
    shape[dim] = 2 * size * chunk
    x = torch.arange(math.prod(shape)).view(shape)
    shards = torch.cat([shard_sequence(x, dim, axis(rank, size)) for rank in range(size)], dim)
    assert torch.equal(shards, as_shards(x, dim, size))
    assert torch.equal(in_order(shards, dim, size), x)
    positions = torch.cat([shard_positions(rank, size, chunk, torch.device("cpu")) for rank in range(size)])
    assert torch.equal(shards, x.index_select(dim % 3, positions))


@given(size=st.integers(2, 5), chunk=st.integers(1, 3), causal=st.booleans(), data=st.data())
def test_what_ranks_see_of_one_another_is_what_the_mask_shows(size, chunk, causal, data) -> None:
    """The rectangle of visible_rows against the mask written out over all positions."""
    source, reader = data.draw(st.permutations(range(size)))[:2]
    queries, keys = (shard_positions(rank, size, chunk, torch.device("cpu")) for rank in (reader, source))
    seen = keys[None, :] <= queries[:, None] if causal else torch.ones(2 * chunk, 2 * chunk, dtype=torch.bool)
    rectangle = torch.zeros_like(seen)
    rectangle[visible_rows(source, reader, chunk, causal)] = True
    assert torch.equal(rectangle, seen)


# -- blocks ----------------------------------------------------------------------------------------


def tensors(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q [2, 6, S, 8], k and v [2, 3, T, 8], gradient of the result [2, 6, S, 8]"""
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 6, queries, 8), (2, 3, keys, 8), (2, 3, keys, 8), (2, 6, queries, 8)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def dense_attention(q, k, v, bias):
    """-> out, by one softmax in fp64 over all keys"""
    k, v = (expand_groups(x.transpose(1, 2), q.shape[1]).transpose(1, 2) for x in (k, v))
    scores = q.double() @ k.double().transpose(2, 3) / math.sqrt(q.shape[-1]) + bias.double()
    return torch.softmax(scores, -1) @ v.double()


def random_bias(queries: int, keys: int) -> torch.Tensor:
    """Different for each sample and head, a third of the keys hidden, key 0 of every query visible."""
    generator = torch.Generator().manual_seed(6)
    bias = torch.randn(2, 6, queries, keys, generator=generator)
    hidden = torch.rand(2, 6, queries, keys, generator=generator) < 0.3
    hidden[..., 0] = False
    return bias.masked_fill(hidden, -math.inf)


@pytest.mark.parametrize("attention", [MATH, FLASH_CPU], ids=["math", "flash"])
def test_blocks_of_keys_add_up_to_one_softmax(attention) -> None:
    """Three blocks of 12 keys; in the last one half of the queries see nothing."""
    q, k, v, grad = tensors(10, 12)
    bias = random_bias(10, 12)
    bias[:, :, :5, 8:] = -math.inf
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    expected = dense_attention(*whole, bias)
    expected.backward(grad.double())

    blocks = [slice(0, 3), slice(3, 8), slice(8, 12)]
    result = None
    for rows in blocks:
        out, lse = attention.forward(q, k[:, :, rows], v[:, :, rows], BlockMask(bias=bias[..., rows]))
        if result is None:
            result = Softmax(out, lse)
        else:
            result.add(slice(0, 10), out, lse)
    torch.testing.assert_close(result.out.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    parts = [
        attention.backward(
            grad, q, k[:, :, rows], v[:, :, rows], result.out, result.lse, BlockMask(bias=bias[..., rows])
        )
        for rows in blocks
    ]
    found = [sum(part[0] for part in parts), *(torch.cat([part[i] for part in parts], 2) for i in (1, 2))]
    for gradient, leaf in zip(found, whole, strict=True):
        torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", [MATH, FLASH_CPU], ids=["math", "flash"])
def test_a_query_that_sees_no_key_weighs_nothing(attention) -> None:
    q, k, v, grad = tensors(4, 4)
    bias = torch.zeros(1, 1, 4, 4)
    bias[:, :, 1] = -math.inf
    mask = BlockMask(bias=bias)
    out, lse = attention.forward(q, k, v, mask)
    assert lse[:, :, 1].isneginf().all()
    assert not out[:, :, 1].any()
    assert lse[:, :, [0, 2, 3]].isfinite().all()
    result = Softmax(out.clone(), lse.clone())
    result.add(slice(0, 4), out, lse)  # still nothing seen by query 1: no NaN from -inf - -inf
    torch.testing.assert_close(result.out, out)
    # The backward pass computes exp(score - lse): +inf in place of -inf makes the weights of a query without keys 0.
    gradients = attention.backward(grad, q, k, v, out, lse.masked_fill(lse.isneginf(), math.inf), mask)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][:, :, 1].any()


def cuda_flash_on(device: str) -> list[torch.Tensor]:
    q, k, v, grad = (x.to(device) for x in tensors(16, 16, torch.bfloat16))
    out, lse = _torch_compat.flash_cuda_forward(q, k, v, True)
    return [out, lse, *_torch_compat.flash_cuda_backward(grad, q, k, v, out, lse, True)]


def test_the_cuda_operators_take_these_arguments() -> None:
    """On meta tensors, which checks the call and the shapes and computes nothing."""
    out, lse, dq, _, _ = cuda_flash_on("meta")
    assert out.shape == dq.shape == (2, 6, 16, 8)
    assert lse.shape == (2, 6, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cuda_operators_agree_with_the_formula() -> None:
    q, k, v, grad = (x.float() for x in tensors(16, 16, torch.bfloat16))
    out, lse = MATH.forward(q, k, v, BlockMask(causal=True))
    expected = [out, lse, *MATH.backward(grad, q, k, v, out, lse, BlockMask(causal=True))]
    for found, right in zip(cuda_flash_on("cuda"), expected, strict=True):
        torch.testing.assert_close(found.cpu().float(), right, rtol=2e-2, atol=2e-2)


# -- heads and axes --------------------------------------------------------------------------------


@given(per_group=st.integers(1, 6), groups=st.integers(1, 6), size=st.integers(1, 8))
def test_repeated_groups_serve_the_heads_they_go_with(per_group, groups, size) -> None:
    heads = per_group * groups
    if heads % size:
        return
    repeats = group_repeats(heads, groups, size)
    wanted = torch.arange(groups).repeat_interleave(per_group).chunk(size)  # the group of each head, by rank
    copies = torch.arange(groups).repeat_interleave(repeats).chunk(size)
    for want, have in zip(wanted, copies, strict=True):
        assert torch.equal(have.repeat_interleave(len(want) // len(have)), want)
    assert groups % size or repeats == 1


def test_inner_axes_are_neighbours_and_outer_ones_stride() -> None:
    inner, outer = hierarchical_members([(0, 2, 4, 6), (1, 3, 5, 7)], 2)
    assert inner == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert outer == [(0, 4), (2, 6), (1, 5), (3, 7)]


def test_legal_values_pass() -> None:
    check_sequence_length(64, 4)
    check_sequence_length(7, 1)
    check_dropout(0.1, 1)
    check_inner_heads((2, 4), 6)
    check_hierarchy((2, 4), 8)


@pytest.mark.parametrize(
    ("check", "given_", "words"),
    [
        (
            check_sequence_length,
            (60, 4),
            r"data.seq_length=60 .*2 x 4 equal chunks .*context_parallel_size=4.* are 56 or 64",
        ),
        (check_sequence_length, (3, 4), "nearest legal values of data.seq_length are 8$"),
        (
            check_dropout,
            (0.1, 4),
            "model.attention_dropout=0.1 .*context_parallel_size=4: .*set model.attention_dropout to 0",
        ),
        (check_inner_heads, ((4,), 6), r'"a2a" divides the 6 .* over the 4 .* can be 1, 2, 3 or 6; .*"p2p"'),
        (check_hierarchy, ((4,), 4), r"sizes=\[4\]: .*can be \[1, 4\], \[2, 2\], \[4, 1\]"),
    ],
)
def test_refusals_say_what_is_legal(check, given_, words) -> None:
    with pytest.raises(ConfigError, match=words):
        check(*given_)


def test_unknown_methods_and_dropout_are_refused_by_the_core() -> None:
    with pytest.raises(ConfigError, match='cp_comm_type="ring" is unknown; it can be p2p, all_gather, a2a or a2a'):
        context_parallel_attention("ring", [axis(0, 2)])
    q = torch.zeros(1, 4, 2, 8)
    for method in ("p2p", "all_gather", "a2a"):
        with pytest.raises(ConfigError, match="model.attention_dropout=0.5"):
            context_parallel_attention(method, [axis(0, 2)])(q, q, q, AttentionPattern(), 0.5)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (AttentionPattern(key_padding=torch.ones(1, 4, dtype=torch.bool)), "padded keys"),
        (AttentionPattern(bias=torch.zeros(1, 1, 4, 4)), "a bias of its own"),
    ],
)
def test_patterns_that_are_not_sharded_are_refused(pattern, words) -> None:
    with pytest.raises(ConfigError, match=words):
        check_pattern(pattern)
