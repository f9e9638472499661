"""GPTQ (Frantar et al., 2022): columns are rounded one after another, and those that follow make up for the error."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_ckpt.quantized.grids import Grid, Scales, in_groups

BLOCK = 128
"""Columns whose errors are added to those behind the block at once."""
DAMPING = 0.01
"""Share of the mean of the diagonal, as in the paper."""


class UnsolvableError(ValueError):
    """Second moments that are not positive definite, however much is added to their diagonal."""


def gptq_codes(
    weight: Tensor,
    moments: Tensor,
    grid: Grid,
    scales: Scales,
    *,
    damping: float = DAMPING,
    by_activity: bool = True,
    sweeps: int = 3,
) -> Tensor:
    """Codes [out, in] of a weight [out, in] in fp32.

    moments: sum or mean of x x^T over inputs, [in, in]. scales: of all groups, in the order of the file; with
    by_activity columns are rounded in the order of their mean squared input, the largest first, and keep the scales of
    their groups (static act-order). sweeps: how often all columns are rounded once more afterwards, given the others.
    Raises UnsolvableError.
    """
    columns = weight.shape[1]
    unseen = moments.diagonal() == 0
    order = _order(moments, by_activity=by_activity)
    group_of = torch.arange(columns, device=weight.device) // (grid.size or columns)
    # A column without inputs has no error: its weights are rounded as they are.
    rest = weight[:, order].clone()
    factor = _inverse_factor(moments[order][:, order], unseen[order], damping)
    codes: Tensor | None = None
    for first in range(0, columns, BLOCK):
        block = slice(first, min(first + BLOCK, columns))
        errors = torch.zeros_like(rest[:, block])
        for number in range(block.stop - first):
            place = first + number
            column = rest[:, place].clone()
            column_scales = scales.of_groups(group_of[order[place : place + 1]])
            code = grid.codes(column[:, None, None].clone(), column_scales)
            codes = weight.new_empty(weight.shape, dtype=code.dtype) if codes is None else codes
            _bytes(codes)[:, order[place]] = _bytes(code)[:, 0, 0]
            error = (column - grid.values(code, column_scales)[:, 0, 0]) / factor[place, place]
            errors[:, number] = error
            # To the end of the block now, to the columns behind it once the block is done.
            rest[:, place : block.stop] -= error[:, None] * factor[place, place : block.stop]
        rest[:, block.stop :] -= errors @ factor[block, block.stop :]
    assert codes is not None
    for _ in range(sweeps):
        _improve_(codes, weight, moments, grid, scales, order, damping)
    return codes


def _improve_(
    codes: Tensor, weight: Tensor, moments: Tensor, grid: Grid, scales: Scales, order: Tensor, damping: float
) -> None:
    """Round each column once more, to the nearest of what the others together want of it (coordinate descent): the
    error of outputs never grows.

    GPTQ rounds a column for those behind it, and knows nothing of how they will be rounded.
    """
    hessian = moments / moments.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    hessian.diagonal().add_(damping)
    errors = weight - grid.values(in_groups(codes, grid.size), scales).flatten(1)
    # [out, in]: by how much a change of each weight lowers the error.
    wanted = errors @ hessian
    group_of = torch.arange(weight.shape[1], device=weight.device) // (grid.size or weight.shape[1])
    for place in range(0, len(order), BLOCK):
        block = order[place : place + BLOCK]
        changes, near = torch.zeros_like(errors[:, block]), wanted[:, block]
        inside = hessian[block][:, block]
        for number, column in enumerate(block.tolist()):
            column_scales = scales.of_groups(group_of[column : column + 1])
            before = weight[:, column] - errors[:, column]
            target = before + near[:, number] / inside[number, number]
            code = grid.codes(target[:, None, None].clone(), column_scales)
            change = grid.values(code, column_scales)[:, 0, 0] - before
            _bytes(codes)[:, column] = _bytes(code)[:, 0, 0]
            errors[:, column] -= change
            changes[:, number] = change
            near -= change[:, None] * inside[number]
        wanted -= changes @ hessian[block]


def nearest_codes(weight: Tensor, grid: Grid, scales: Scales) -> Tensor:
    """Codes [out, in], each the nearest."""
    return grid.codes(in_groups(weight, grid.size).clone(), scales).flatten(1)


def _order(moments: Tensor, *, by_activity: bool) -> Tensor:
    if not by_activity:
        return torch.arange(len(moments), device=moments.device)
    # stable: columns with equal moments stay in their order, whatever computes them.
    return moments.diagonal().sort(descending=True, stable=True).indices


def _inverse_factor(moments: Tensor, unseen: Tensor, damping: float) -> Tensor:
    """U, upper triangular, of (moments + damping)^-1 = U^T U, in fp32."""
    hessian = moments.double()
    hessian = hessian / hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    hessian.diagonal()[unseen] = 1.0
    for more in (1.0, 10.0, 100.0):
        damped = hessian.clone()
        damped.diagonal().add_(damping * more)
        lower, info = torch.linalg.cholesky_ex(damped)
        if info.item() == 0:
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if info.item() == 0:
                return upper.float()
    raise UnsolvableError


def _bytes(codes: Tensor) -> Tensor:
    """Few operations take float8."""
    return codes.view(torch.uint8)
