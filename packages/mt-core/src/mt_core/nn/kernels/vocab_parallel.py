"""Cross entropy over vocabulary-sharded logits: the part common to all row kernels.

For one position let m be the largest logit, s = sum exp(z - m) and y the logit of the label. A rank finds the three
of its own columns in one pass over them (online softmax, Milakov and Gimelshein, 2018); two reductions of one and
two numbers a position make them those of the whole vocabulary:

    m = max over ranks    s = sum over ranks of s_r exp(m_r - m)    y = sum over ranks of y_r (0 where it is not)
    lse = m + log s       loss = m - y + log s       d loss / d z_j = exp(z_j - lse) - [j is the label]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.parallel.context import Axis
from mt_core.parallel.reductions import all_reduce_


@dataclass(frozen=True)
class RowKernels:
    """statistics: (logits [T, P], columns [T], V) -> [3, T], m, s and y of this rank in fp32 or wider.

    subtract_target_: (logits [T, P], columns [T], lse [T], factor [T], V) -> None; logits become their own gradient,
    factor * (exp(z - lse) - [column]), in place. A column outside [0, V) is another rank's. The first V columns stand
    for ids; those behind them are left out, and have gradient 0.
    """

    statistics: Callable[[Tensor, Tensor, int], Tensor]
    subtract_target_: Callable[[Tensor, Tensor, Tensor, Tensor, int], None]

    def loss_and_gradient_(self, logits: Tensor, columns: Tensor, factor: Tensor, axis: Axis, ids: int) -> Tensor:
        """Losses [T]; logits [T, P] become the gradient of their sum weighted by factor [T]. ids: V. Collective."""
        losses, lse = reduce_statistics(self.statistics(logits, columns, ids), axis)
        self.subtract_target_(logits, columns, lse, factor, ids)
        return losses


def cross_entropy_by(rows: RowKernels, logits: Tensor, columns: Tensor, axis: Axis, overwrite: bool) -> Tensor:
    """Same as mt_core.nn.kernels.reference.cross_entropy.cross_entropy, with these kernels."""
    losses: Tensor = _CrossEntropy.apply(rows, logits, columns, axis, overwrite)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: RowKernels, logits: Tensor, columns: Tensor, axis: Axis, overwrite: bool) -> Tensor:
        losses, lse = reduce_statistics(rows.statistics(logits, columns, logits.shape[1]), axis)
        ctx.save_for_backward(logits, columns, lse)
        ctx.rows, ctx.overwrite = rows, overwrite
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        logits, columns, lse = ctx.saved_tensors
        # Without `overwrite` the logits may be saved by an operation before, such as a soft cap.
        gradient = logits if ctx.overwrite else logits.clone()
        ctx.rows.subtract_target_(gradient, columns, lse, grads[0], logits.shape[1])
        return None, gradient, None, None, None


def reduce_statistics(rank_statistics: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """[3, T] of this rank -> losses [T] and lse [T] of the whole vocabulary. Changes `rank_statistics`; collective."""
    largest, sums = rank_statistics[0], rank_statistics[1:]  # [T], [2, T]
    if axis.size > 1:
        before = largest.clone()
        # Two reductions: the sums can be brought to a common maximum only when it is known.
        all_reduce_(largest, axis, "max")
        # A rank of padding only has m = -inf and s = 0; its factor exp(-inf) is 0.
        sums[0].mul_(torch.exp(before - largest))
        all_reduce_(sums, axis)
    # s is at least 1: the rank of the largest logit has exp(0) among its terms.
    log_sum = sums[0].log()
    # m - y first: they are of one size, and may be large beside log s.
    return largest - sums[1] + log_sum, largest + log_sum
