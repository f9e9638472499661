"""Context parallel by heads (DeepSpeed-Ulysses, arXiv:2309.14509): an all-to-all trades tokens for heads.

    before    all heads    of the tokens of this rank      q [B, S / CP, N, D]
    inside    some heads   of all tokens                   q [B, S, N / CP, D]
    after     all heads    of the tokens of this rank

Inside, any attention core works: that of one process, or that of an outer axis (`core.build_hierarchical_axes`).
Heads have to be divisible by CP. Key-value groups that are not are repeated, as often as is needed for a rank to get
the groups of its own heads, and no more; gradients of the copies are summed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.config.checks import divisors, listed
from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.context_parallel.masks import SegmentGatherer
from mt_core.nn.context_parallel.zigzag import as_shards, in_order
from mt_core.parallel.context import Axis, waiting


def ulysses_attention(axis: Axis, core: AttentionCore) -> AttentionCore:
    """`core` over the sequences of all ranks of the axis, each rank with its share of the heads."""
    # [CP, B, 2c] -> [B, S]
    gather = SegmentGatherer(axis, lambda shards: in_order(shards.movedim(0, 1).flatten(1, 2), 1, axis.size))

    def attend(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float, *sinks: Tensor) -> Tensor:
        check_heads(q.shape[2], axis.size)
        repeats = group_repeats(q.shape[2], k.shape[2], axis.size)
        k, v = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k, v))
        inside = AttentionPattern(
            pattern.causal,
            gather(pattern.segment_ids),
            own_heads(pattern.alibi_slopes, axis),
            window=pattern.window,
        )
        q, k, v = to_heads((q, k, v), axis)
        return to_tokens(core(q, k, v, inside, dropout, *(own_heads(x, axis) for x in sinks)), axis)

    return attend


def check_heads(heads: int, size: int) -> None:
    """Raises ConfigError, with the legal sizes, unless every rank gets the same number of heads."""
    if heads % size:
        raise ConfigError(
            f'parallel.cp_comm_type "a2a" divides the {heads} attention heads of a tensor-parallel rank over the '
            f"{size} context-parallel ranks of an all-to-all, of which there can be {listed(divisors(heads))}; "
            'change parallel.context_parallel_size (for "a2a+p2p": the first of '
            'parallel.hierarchical_context_parallel_sizes), or use "p2p" or "all_gather", which take any number'
        )


def group_repeats(heads: int, groups: int, size: int) -> int:
    """Number of copies of each key-value group, so that groups can be sharded over the ranks like the heads."""
    # 8 heads, 2 groups, CP 4: every group twice, so that each rank has one group for its two heads.
    return next(times for times in divisors(heads // groups) if groups * times % size == 0)


def own_heads(numbers: Tensor | None, axis: Axis) -> Tensor | None:
    """One for each head, [N] -> [N / CP]: those of the heads that this rank computes."""
    return None if numbers is None else numbers.chunk(axis.size)[axis.rank]


class _AllToAll(torch.autograd.Function):
    """[CP, ...], one chunk for each rank -> [CP, ...], one chunk from each. Its own conjugate."""

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_to_all(chunks, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grads[0], ctx.axis), None


def all_to_all(chunks: Tensor, axis: Axis) -> Tensor:
    received = torch.empty_like(chunks, memory_format=torch.contiguous_format)
    with waiting(axis):
        dist.all_to_all_single(received, chunks.contiguous(), group=axis.group)
    return received


def to_heads(tensors: tuple[Tensor, ...], axis: Axis) -> list[Tensor]:
    """Each [B, S / CP, heads, D] -> [B, S, heads / CP, D], all in one all-to-all."""
    shapes = [(x.shape[2] // axis.size, x.shape[3]) for x in tensors]
    # For each rank, per token, the features of its heads of every tensor: [CP, S / CP, B, heads / CP * D]
    chunks = [x.unflatten(2, (axis.size, -1)).permute(2, 1, 0, 3, 4).flatten(3) for x in tensors]
    received = _AllToAll.apply(torch.cat(chunks, -1), axis).flatten(0, 1)  # [S, B, features]
    whole = in_order(received, 0, axis.size).transpose(0, 1)  # [B, S, features]
    parts = whole.split([math.prod(shape) for shape in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def to_tokens(x: Tensor, axis: Axis) -> Tensor:
    """[B, S, heads / CP, D] -> [B, S / CP, heads, D]"""
    chunks = as_shards(x.transpose(0, 1), 0, axis.size).unflatten(0, (axis.size, -1))  # [CP, S / CP, B, heads, D]
    received: Tensor = _AllToAll.apply(chunks, axis)
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3)
