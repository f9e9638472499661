"""Linear projection and cross entropy without the logits: [T, H] x [V, H] -> losses, some tokens at a time.

Two forms, by what is known of the gradient. Any gradient of each loss: the backward pass computes the logits a
second time (4 matrix products). A weighted sum of the losses, weights known beforehand: the forward pass finishes
the gradients while it has the logits, and the backward pass only scales them (3 products).

A weight with a main gradient has its products added there in fp32. Of the second form they are added up in fp32 apart,
[V, H], and the backward pass adds a multiple of that.

A weight may end with rows of padding. They are multiplied too, since products and kernels need aligned numbers of
columns (50,257 ids are none), and are left out of the losses; their gradient is 0.

hidden has to be what all ranks of the axis share, through `copy_to` or `gather_from`, whose backward adds up the
ranks' parts of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_core._torch_compat import gradients_wanted
from mt_core.nn.kernels.vocab_parallel import RowKernels, reduce_statistics
from mt_core.nn.main_grad import MainGrad, main_gradient_of
from mt_core.parallel.context import Axis

CHUNK_BYTES = 2**30
"""Bytes of logits at a time: 4096 rows of 128k ids. Each chunk reads and writes the weight's fp32 gradient."""
CPU_CHUNK_BYTES = 100 * 2**20
"""The same on a CPU, where fewer rows suffice and passes over the logits are bound by memory."""
ROW_MULTIPLE = 128


def rows_of_chunk(hidden: Tensor, weight: Tensor) -> int:
    """Tokens at a time: a multiple of 128 whose logits take at most CHUNK_BYTES, and at least 128."""
    limit = CPU_CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES
    rows = limit // max(len(weight) * hidden.element_size(), 1)
    return max(rows // ROW_MULTIPLE * ROW_MULTIPLE, ROW_MULTIPLE)


def chunked_losses(
    hidden: Tensor,
    weight: Tensor,
    columns: Tensor,
    axis: Axis,
    rows: RowKernels,
    chunk: int | None = None,
    ids: int | None = None,
) -> Tensor:
    """hidden [T, H], weight [V, H] of this rank, columns [T] as in cross_entropy -> losses [T] in fp32.

    Two reductions over the axis, of all tokens at once. chunk: tokens at a time. ids: rows of weight that stand for
    ids, the first ones; default all.
    """
    of_rows = _with_ids(rows, weight, ids)  # ids: the columns that count
    chunk = chunk or rows_of_chunk(hidden, weight)
    return _ChunkedLosses.apply(hidden, weight, main_gradient_of(weight), columns, axis, of_rows, chunk)


def chunked_weighted_sum(
    hidden: Tensor,
    weight: Tensor,
    columns: Tensor,
    loss_weights: Tensor,
    axis: Axis,
    rows: RowKernels,
    chunk: int | None = None,
    ids: int | None = None,
) -> tuple[Tensor, Tensor]:
    """-> sum over tokens of loss_weights * loss, and the losses [T], which are not differentiable.

    loss_weights [T] in fp32, not differentiated. Two reductions over the axis for each chunk.
    """
    of_rows, main = _with_ids(rows, weight, ids), main_gradient_of(weight)
    chunk = chunk or rows_of_chunk(hidden, weight)
    return _ChunkedWeightedSum.apply(hidden, weight, main, columns, loss_weights, axis, of_rows, chunk)


@dataclass(frozen=True)
class _RowsWithIds:
    """Row kernels for logits of which the first `ids` columns count."""

    kernels: RowKernels
    ids: int

    def statistics(self, logits: Tensor, columns: Tensor) -> Tensor:
        return self.kernels.statistics(logits, columns, self.ids)

    def subtract_target_(self, logits: Tensor, columns: Tensor, lse: Tensor, factor: Tensor) -> None:
        self.kernels.subtract_target_(logits, columns, lse, factor, self.ids)

    def loss_and_gradient_(self, logits: Tensor, columns: Tensor, factor: Tensor, axis: Axis) -> Tensor:
        return self.kernels.loss_and_gradient_(logits, columns, factor, axis, self.ids)


def _with_ids(rows: RowKernels, weight: Tensor, ids: int | None) -> _RowsWithIds:
    return _RowsWithIds(rows, len(weight) if ids is None else ids)


class _ChunkedLosses(torch.autograd.Function):
    """hidden [T, H], weight [V, H], columns [T] -> losses [T]. Kept for the backward pass besides these: lse [T]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        main: MainGrad | None,
        columns: Tensor,
        axis: Axis,
        rows: _RowsWithIds,
        chunk: int,
    ) -> Tensor:
        # m, s and y of vocab_parallel for each token: [3, T]
        statistics = torch.empty(3, len(hidden), dtype=_wide(hidden), device=hidden.device)
        for part in _parts(len(hidden), chunk):
            # The chunk's logits [t, V] are freed here: of each token three numbers are kept.
            statistics[:, part] = rows.statistics(F.linear(hidden[part], weight), columns[part])
        # Once for all chunks, so that the number of collectives does not depend on the chunk size.
        losses, lse = reduce_statistics(statistics, axis)
        ctx.save_for_backward(hidden, weight, columns, lse)
        ctx.main, ctx.rows, ctx.chunk = main, rows, chunk
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, columns, lse = ctx.saved_tensors
        wants_dhidden, wants_dweight = gradients_wanted(ctx, 2)
        # Without fp32 main gradients the gradient is returned to autograd in the weight's dtype; with them it is added
        # there, and autograd gets None.
        weight_sum = _OwnFormat(torch.empty_like(weight)) if wants_dweight and ctx.main is None else None
        sums = weight_sum or ctx.main if wants_dweight else None
        gradients = _Gradients(hidden, weight, sums, wants_dhidden, empty=weight_sum is not None)
        for part in _parts(len(hidden), ctx.chunk):
            # Same operands and kernel as in the forward pass, so the same logits; they become their own gradient in
            # place.
            logits = F.linear(hidden[part], weight)
            ctx.rows.subtract_target_(logits, columns[part], lse[part], grads[0][part])  # [t, V]
            gradients.add(part, logits)
            # Freed before the next chunk's are computed: a name holds them until it is bound again.
            del logits
        return gradients.hidden, None if weight_sum is None else weight_sum.total, None, None, None, None, None


class _ChunkedWeightedSum(torch.autograd.Function):
    """-> the weighted sum [] and the losses [T]. The gradients of hidden [T, H] and weight [V, H] are made in the
    forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        main: MainGrad | None,
        columns: Tensor,
        loss_weights: Tensor,
        axis: Axis,
        rows: _RowsWithIds,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(hidden), dtype=_wide(hidden), device=hidden.device)
        # What the sum's gradient is, is not known yet, so that nothing can be added to the main gradient.
        total = torch.empty_like(weight, dtype=weight.dtype if main is None else torch.float32)  # [V, H]
        weight_sum = _OwnFormat(total) if main is None else MainGrad(total)
        gradients = _Gradients(hidden, weight, weight_sum, empty=True)
        for part in _parts(len(hidden), chunk):
            logits = F.linear(hidden[part], weight)
            # The whole lse is needed for the gradient of this chunk, so ranks reduce here and not once behind the loop.
            # Ranks of the axis have the same tokens, and so the same number of chunks.
            losses[part] = rows.loss_and_gradient_(logits, columns[part], loss_weights[part], axis)
            gradients.add(part, logits)
            # Freed before the next chunk's are computed: a name holds them until it is bound again.
            del logits
        # Not by save_for_backward: the backward pass scales both in place, and frees them.
        ctx.made, ctx.main = (gradients.hidden, weight_sum.total), main
        ctx.mark_non_differentiable(losses)
        return (losses * loss_weights).sum(), losses  # [], [T]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.made = ctx.made, None
        if gradients is None:
            raise RuntimeError("a weighted sum of chunked losses has one backward pass; its gradients are used up")
        hidden, weight = gradients
        if ctx.main is None:
            # grads[0] is [] on the device, and is not read by the host.
            # Scaled where they stand, as a second gradient of the weight would cost what is saved on logits.
            return hidden.mul_(grads[0]), weight.mul_(grads[0]), *(None,) * 6
        if gradients_wanted(ctx, 2)[1]:
            ctx.main.add_multiple(weight, grads[0])
        # Where the weight's gradient is not requested (a split backward pass), only that of hidden is returned.
        return hidden.mul_(grads[0]), *(None,) * 7


@dataclass(frozen=True)
class _OwnFormat:
    """A sum of products in the dtype of its operands."""

    total: Tensor

    def set_product(self, rows: Tensor, inputs: Tensor) -> None:
        """total [out, in] = rows^T inputs"""
        # out=: no second [V, H], and no zeros to be written before.
        torch.mm(rows.T, inputs, out=self.total)

    def add_product(self, rows: Tensor, inputs: Tensor) -> None:
        """total [out, in] += rows^T inputs. rows [n, out], inputs [n, in]"""
        self.total.addmm_(rows.T, inputs)


class _Gradients:
    """Gradients of hidden and weight, filled a chunk of logits' gradients at a time; one of them alone if requested.

    weight_sum: what the weight's is added to. empty: it has no content yet; the first product is written to it.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        weight_sum: MainGrad | _OwnFormat | None,
        wants_hidden: bool = True,
        *,
        empty: bool,
    ) -> None:
        self._inputs, self._weight, self._weight_sum = hidden, weight, weight_sum
        self._empty = empty
        self.hidden = torch.empty_like(hidden) if wants_hidden else None  # [T, H]
        # Without tokens no product writes to it.
        if empty and weight_sum is not None and len(hidden) == 0:
            weight_sum.total.zero_()

    def add(self, part: slice, logits: Tensor) -> None:
        """part: rows of hidden. logits [t, V]: their gradient."""
        if self.hidden is not None:
            torch.mm(logits, self._weight, out=self.hidden[part])  # [t, V] x [V, H]; `logits` is their gradient
        if self._weight_sum is None:
            return
        if self._empty:
            self._weight_sum.set_product(logits, self._inputs[part])
        else:
            self._weight_sum.add_product(logits, self._inputs[part])
        self._empty = False


def _parts(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)  # fp32, or fp64 for fp64
