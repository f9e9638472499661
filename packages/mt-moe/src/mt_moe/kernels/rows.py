"""The two primitives of `mt_moe.permutation` in Triton: row gather and row sum, without index tensors in memory
and with fp32 accumulation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mt_moe.permutation import RowKernels

BLOCK = 1024
"""Columns that a program copies in one step."""


@triton.jit
def _moe_gather_rows(source, rows, out, width, source_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + place)
    # The number of columns to read: none of an empty row, whose mask is then false everywhere.
    there = tl.where(row >= 0, width, 0)
    values = tl.load(source + row * source_stride + columns, mask=columns < there, other=0.0)
    tl.store(out + place * width + columns, values, mask=columns < width)


@triton.jit
def _moe_sum_rows(  # type: ignore[no-untyped-def]
    source, places, out, width, source_stride, COPIES: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=DTYPE)
    # In a fixed order: the sum is deterministic.
    for copy in tl.static_range(COPIES):
        place = tl.load(places + row * COPIES + copy)
        there = tl.where(place >= 0, width, 0)
        values = tl.load(source + place * source_stride + columns, mask=columns < there, other=0.0)
        total += values.to(DTYPE)
    tl.store(out + row * width + columns, total, mask=columns < width)


def triton_gather_rows(x: Tensor, rows: Tensor, complete: bool) -> Tensor:
    out = x.new_empty(len(rows), x.shape[1])
    if out.numel():
        x = x.contiguous()
        grid = (len(rows), triton.cdiv(x.shape[1], BLOCK))
        _moe_gather_rows[grid](x, rows.contiguous(), out, x.shape[1], x.stride(0), BLOCK=BLOCK)
    return out


def triton_sum_rows(y: Tensor, places: Tensor, complete: bool) -> Tensor:
    out = y.new_empty(len(places), y.shape[1])
    if out.numel():
        y = y.contiguous()
        grid = (len(places), triton.cdiv(y.shape[1], BLOCK))
        wide = tl.float64 if y.element_size() == 8 else tl.float32
        _moe_sum_rows[grid](
            y, places.contiguous(), out, y.shape[1], y.stride(0), COPIES=places.shape[1], DTYPE=wide, BLOCK=BLOCK
        )
    return out


TRITON_ROWS = RowKernels(triton_gather_rows, triton_sum_rows)
