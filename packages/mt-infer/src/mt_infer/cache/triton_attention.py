# mypy: disable-error-code="no-untyped-def"
"""Paged attention in Triton, with the keys of a sequence split over programs (flash-decoding, Dao et al., 2023).

Each program computes the heads of a group over a part of the keys. A second kernel combines the parts by their
log-sum-exps. The number of parts is fixed and their length follows from the positions on the device, so that a CUDA
graph of the launches serves sequences of any length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.cache import PagedScores
from mt_core.nn.kernels.triton_kernels.launch import multiprocessors, on_device
from mt_infer.cache.paged_attention import PageTable

MOST_SPLITS = 64
STAGES = 2
WIDE = 256
"""Channels of a key from which on tiles have fewer keys, so that they fit into shared memory."""
LARGEST_OF_4_WARPS = 32 * 256
"""Elements of an output tile (heads times channels of a value) in the registers of 4 warps; larger ones take 8."""


class Tile(NamedTuple):
    """Heads and keys that a program computes at once, and its warps."""

    heads: int
    keys: int
    warps: int


def tile_of(per_group: int, dim: int, value: int) -> Tile:
    """per_group: query heads of a group of keys. dim, value: channels of a key and of a value."""
    # 16 at least, for tl.dot. Larger groups take several tiles.
    heads = min(max(triton.next_power_of_2(per_group), 16), 32)
    # 32 heads of latents (512 channels) in 4 warps would be 128 registers a thread for the output alone, and spill.
    return Tile(heads, 64 if dim < WIDE else 32, 4 if heads * channels(value) <= LARGEST_OF_4_WARPS else 8)


@triton.jit
def _paged_attention_part(
    q, k, q_second, k_second, v, blocks, positions, slopes, parts, lse, scale, softcap, window, heads, most_blocks,
    q_row, q_head, second_row, second_head, k_place, k_group, k_second_place, k_second_group, v_place, v_group,
    PER_GROUP: tl.constexpr, DIM: tl.constexpr, SECOND: tl.constexpr, VALUE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_SECOND: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """parts [B, N, SPLITS, V] and lse [B, N, SPLITS] in fp32; -inf for a part without keys."""
    # Program (row, group and tile of its heads, split). int64: a cache can have more than 2^31 elements.
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    # Heads of a group share its keys: each tile of keys is loaded once for HEADS of them.
    tiles = (PER_GROUP + HEADS - 1) // HEADS
    group = tl.program_id(1) // tiles
    in_group = (tl.program_id(1) % tiles) * HEADS + tl.arange(0, HEADS)
    # HEADS is 16 at least, for tl.dot; the rest of the tile is masked.
    is_head = in_group < PER_GROUP
    head = group * PER_GROUP + in_group
    channel, value = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    # Read from device memory, not passed: the value of a captured launch may change.
    position = tl.load(positions + row)
    end = position + 1
    first = tl.maximum(end - window, 0) if WINDOW else end * 0
    # Splits are whole tiles of KEYS, counted from a multiple of it. Example, KEYS=64, SPLITS=4, end=300: 5 tiles, 2 for
    # each split; the third has the last of them and the fourth has none.
    begin = first // KEYS * KEYS
    length = tl.cdiv(tl.cdiv(end - begin, KEYS), SPLITS) * KEYS
    start = begin + split * length
    stop = tl.minimum(start + length, end)
    queries = tl.load(
        q + row * q_row + head[:, None] * q_head + channel[None, :],
        mask=is_head[:, None] & (channel < DIM)[None, :], other=0.0,
    )  # fmt: skip
    if SECOND > 0:
        second = tl.arange(0, BLOCK_SECOND)
        second_queries = tl.load(
            q_second + row * second_row + head[:, None] * second_head + second[None, :],
            mask=is_head[:, None] & (second < SECOND)[None, :], other=0.0,
        )  # fmt: skip
    if SLOPES:
        slope = tl.load(slopes + head, mask=is_head, other=0.0).to(tl.float32)
    largest = tl.full([HEADS], float("-inf"), tl.float32)  # online softmax (Milakov and Gimelshein, 2018)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, BLOCK_VALUE], tl.float32)
    for at in range(start, stop, KEYS):
        key = at + tl.arange(0, KEYS)
        there = key < stop
        # [KEYS]: the tile's keys are in pages anywhere in memory.
        block = tl.load(blocks + row * most_blocks + key // PAGE, mask=there, other=0).to(tl.int64)
        place = block * PAGE + key % PAGE
        keys = tl.load(
            k + place[:, None] * k_place + group * k_group + channel[None, :],
            mask=there[:, None] & (channel < DIM)[None, :], other=0.0,
        )  # fmt: skip
        # [HEADS, KEYS] in fp32. ieee: without TF32 for fp32 inputs.
        score = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        # Queries and keys in two parts, whose products are added: latent attention keeps rotary channels apart.
        if SECOND > 0:
            second_keys = tl.load(
                k_second + place[:, None] * k_second_place + group * k_second_group + second[None, :],
                mask=there[:, None] & (second < SECOND)[None, :], other=0.0,
            )  # fmt: skip
            score += tl.dot(second_queries, tl.trans(second_keys), input_precision="ieee")
        score *= scale
        if SOFTCAP:
            # tl has no tanh: tanh(x) = 2 sigmoid(2x) - 1.
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
        if SLOPES:
            score -= slope[:, None] * (position - key).to(tl.float32)[None, :]
        # begin is before `first` by up to a tile: keys outside the window are masked here.
        score = tl.where((there & (key >= first))[None, :], score, float("-inf"))
        after = tl.maximum(largest, tl.max(score, 1))
        # Where every key so far is masked the maximum is -inf, and -inf - (-inf) would be NaN.
        shift = tl.where(after == float("-inf"), 0.0, after)
        weight = tl.exp(score - shift[:, None])
        # What is summed so far is scaled to the new maximum.
        before = tl.exp(largest - shift)
        # The values of latent attention are the latents that are its keys: one load serves both.
        if VALUES_ARE_KEYS:
            values = keys
        else:
            values = tl.load(
                v + place[:, None] * v_place + group * v_group + value[None, :],
                mask=there[:, None] & (value < VALUE)[None, :], other=0.0,
            )  # fmt: skip
        out = out * before[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        total = total * before + tl.sum(weight, 1)
        largest = after
    # A split behind the end has total 0: lse -inf gives it weight 0 when parts are combined, and 0 / 1 is no NaN.
    seen = total > 0.0
    place = (row * heads + head) * SPLITS + split
    tl.store(lse + place, tl.where(seen, largest + tl.log(tl.where(seen, total, 1.0)), float("-inf")), mask=is_head)
    tl.store(
        parts + place[:, None] * VALUE + value[None, :],
        out / tl.where(seen, total, 1.0)[:, None],
        mask=is_head[:, None] & (value < VALUE)[None, :],
    )  # fmt: skip


@triton.jit
def _paged_attention_combine(
    parts, lse, sinks, out, heads, SINKS: tl.constexpr, VALUE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """out [B, N, V]: the mean of the parts by exp(lse); a sink adds to the denominator."""
    # Program: a row and head, numbered row * N + head.
    head, value, split = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, SPLITS)
    sums = tl.load(lse + head * SPLITS + split)  # [SPLITS]
    largest = tl.max(sums, 0)
    if SINKS:
        sink = tl.load(sinks + head % heads).to(tl.float32)
        largest = tl.maximum(largest, sink)
    # largest is finite: the sequence's own position is always seen.
    weight = tl.exp(sums - largest)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp(sink - largest)
    means = tl.load(
        parts + (head * SPLITS + split)[:, None] * VALUE + value[None, :], mask=(value < VALUE)[None, :], other=0.0
    )
    tl.store(out + head * VALUE + value, tl.sum(means * weight[:, None], 0) / total, mask=value < VALUE)


def triton_paged_attention(
    queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], values: Tensor, table: PageTable, scores: PagedScores
) -> Tensor:
    """The kernel of mt_infer.cache.paged_attention.plain_paged_attention, for one or two queries and keys."""
    queries = tuple(query if query.stride(-1) == 1 else query.contiguous() for query in queries)
    (q, k), (q_second, k_second) = (queries[0], keys[0]), (queries[-1], keys[-1])
    second = q_second.shape[-1] if len(queries) > 1 else 0
    rows, heads, dim = q.shape
    groups, width = values.shape[1:]
    per_group = heads // groups
    tile = tile_of(per_group, dim, width)
    programs = rows * groups * triton.cdiv(per_group, tile.heads)
    # Of the longest sequence, in place of the present ones: the grid of a captured launch is fixed.
    reach = table.blocks.shape[1] * table.block_size
    splits = splits_of(programs, min(reach, scores.window or reach), tile.keys, multiprocessors(q))
    out = q.new_empty(rows, heads, width)
    parts = q.new_empty(rows, heads, splits, width, dtype=torch.float32)
    lse = q.new_empty(rows, heads, splits, dtype=torch.float32)
    # The same memory with the same view of it.
    are_keys = values.data_ptr() == k.data_ptr() and values.shape == k.shape and values.stride() == k.stride()
    with on_device(q):
        _paged_attention_part[(rows, programs // rows, splits)](
            # With one query and key, the second pointers repeat the first and are not read (SECOND = 0).
            q, k, q_second, k_second, values, table.blocks, table.positions, scores.slopes, parts, lse,
            scores.scale, scores.softcap or 0.0, scores.window or 0, heads, table.blocks.shape[1],
            *q.stride()[:2], *q_second.stride()[:2], *k.stride()[:2], *k_second.stride()[:2], *values.stride()[:2],
            per_group, dim, second, width,
            scores.window is not None, scores.softcap is not None, scores.slopes is not None, are_keys,
            table.block_size, splits, tile.heads, tile.keys,
            channels(dim), channels(second), channels(width), num_warps=tile.warps, num_stages=STAGES,
        )  # fmt: skip
        _paged_attention_combine[(rows * heads,)](
            parts, lse, scores.sinks, out, heads, scores.sinks is not None, width, splits, channels(width), num_warps=4
        )
    return out


def splits_of(programs: int, reach: int, tile: int, processors: int) -> int:
    """Parts of the keys, so that all processors have work: a power of 2, at most one for each tile of `reach` keys."""
    # Two programs a multiprocessor. More splits than tiles would be empty.
    wanted = triton.next_power_of_2(triton.cdiv(2 * processors, programs))
    return int(min(wanted, triton.next_power_of_2(triton.cdiv(reach, tile)), MOST_SPLITS))


def channels(size: int) -> int:
    """Channels of a tile of keys or values that have so many: tl.dot takes powers of 2 from 16. 0 for no second key."""
    return max(int(triton.next_power_of_2(size)), 16) if size else 0
