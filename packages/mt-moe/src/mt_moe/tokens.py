"""Which tokens of a micro-batch this rank routes: every token is routed by exactly one rank.

Context- and data-parallel ranks hold different tokens. So do tensor-parallel ranks under sequence parallelism;
without it they hold the same tokens, and each takes its slice here. After that, all ranks of a pipeline stage hold
different tokens in every layout, so that one rule is enough: the gradient of parameters that every rank applies
to its own tokens (the router) is summed over tp, cp and dp; that of an expert over the ranks that send tokens to it,
by the dispatcher, and then over edp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import AxisName
from mt_core.parallel.collectives import gather_copies, gather_from, reduce_from, split_to
from mt_core.parallel.context import Axis, ParallelContext


@dataclass(frozen=True)
class TokenShare:
    """This rank's tokens [T, H] of a micro-batch; T may be 0.

    sequence: [T] int64, to which of the micro-batch's sequences each belongs. total: tokens of the micro-batch over
    all ranks that share it, which are those on `axes`.
    """

    tokens: Tensor
    sequence: Tensor
    num_sequences: int
    total: int
    axes: tuple[Axis, ...]

    def sum(self, x: Tensor) -> Tensor:
        """x summed over the ranks that share the micro-batch; each rank gets the gradient of its own term."""
        for axis in self.axes:
            x = reduce_from(x, axis)
        return x


def partial_gradient_axes(ctx: ParallelContext) -> tuple[AxisName, ...]:
    """Axes, besides the data-parallel ones, over which the gradient of a parameter applied to each rank's tokens is
    partial."""
    return ("tp",) if ctx.tp.size > 1 else ()


def share_tokens(x: Tensor, ctx: ParallelContext) -> TokenShare:
    """x [B, S, H], S sharded with sequence and context parallelism -> this rank's tokens."""
    batch, length, _ = x.shape
    tokens = x.flatten(0, 1)
    sequence = torch.arange(batch, device=x.device).repeat_interleave(length)
    # cp shards the sequence: every rank holds S / cp tokens of each.
    total = batch * length * ctx.cp.size
    if ctx.sequence_parallel:
        total *= ctx.tp.size
    elif ctx.tp.size > 1:
        _, size, count = _slice_of_rank(len(tokens), ctx.tp)
        # Padded to equal slices for the all-gather of the backward pass; the padding is cut off again and routed
        # nowhere.
        tokens = split_to(_fill(tokens, size * ctx.tp.size), 0, ctx.tp)[:count]
    # Data-parallel ranks have other micro-batches and are not among them.
    axes = tuple(axis for axis in (ctx.tp, ctx.cp) if axis.size > 1)
    return TokenShare(tokens, own_tokens(sequence, ctx), batch, total, axes)


def own_tokens(tokens: Tensor, ctx: ParallelContext) -> Tensor:
    """Those of the tokens [B x S, ...] of this rank that it routes; not differentiable over ranks."""
    if ctx.tp.size == 1 or ctx.sequence_parallel:
        return tokens
    first, _, length = _slice_of_rank(len(tokens), ctx.tp)
    return tokens[first : first + length]


def share_ids(ids: Tensor, ctx: ParallelContext) -> Tensor:
    """ids [B, S] of whole sequences -> [T], those of the tokens of `share_tokens`."""
    if ctx.sequence_parallel:
        ids = ids.chunk(ctx.tp.size, 1)[ctx.tp.rank]
    return own_tokens(ids.flatten(), ctx)


def join_tokens(tokens: Tensor, like: Tensor, ctx: ParallelContext) -> Tensor:
    """The inverse of share_tokens: this rank's tokens [T, H] -> [B, S, H] as `like`."""
    if ctx.tp.size > 1 and not ctx.sequence_parallel:
        count = like.shape[0] * like.shape[1]
        _, size, _ = _slice_of_rank(count, ctx.tp)
        # Every tensor-parallel rank then has all tokens and computes the same, hence gather_copies.
        tokens = gather_copies(_fill(tokens, size), 0, ctx.tp)[:count]
    return tokens.view(like.shape)


def whole_rows(rows: Tensor, like: Tensor, ctx: ParallelContext) -> Tensor:
    """rows [T, n] of this rank's tokens, from share_tokens of `like` [B, S, H] -> [B, whole S, n] on every
    tensor-parallel rank. Backward sums their gradients: each rank uses the rows for other channels."""
    batch, length, _ = like.shape
    if ctx.sequence_parallel:
        return gather_from(rows.view(batch, length, -1), 1, ctx.tp)
    if ctx.tp.size > 1:
        _, size, _ = _slice_of_rank(batch * length, ctx.tp)
        rows = gather_from(_fill(rows, size), 0, ctx.tp)[: batch * length]
    return rows.view(batch, length, -1)


def _slice_of_rank(count: int, axis: Axis) -> tuple[int, int, int]:
    """Slice of `count` tokens: this rank's first token, the size of a full slice, and that of this rank's slice (the
    last ranks may have fewer, or none)."""
    # 5 tokens on 4 ranks: slices of 2, 2, 1 and 0.
    size = -(-count // axis.size)
    first = min(size * axis.rank, count)
    return first, size, min(size, count - first)


def _fill(tokens: Tensor, rows: int) -> Tensor:
    return tokens if len(tokens) == rows else F.pad(tokens, (0, 0, 0, rows - len(tokens)))
