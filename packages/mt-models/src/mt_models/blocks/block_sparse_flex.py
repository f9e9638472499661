"""Attention over chosen blocks by torch's FlexAttention: scores of tiles of 128 queries and 128 keys that nobody in the
tile attends to are not computed, and no tensor of all scores exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_models.blocks.block_sparse_attention import BlockSparsePattern
from mt_models.blocks.key_blocks import KeyBlocks

TILE = 128
"""Queries and keys of a tile."""
WORD = 32
"""Blocks whose choice is kept in one number."""


class BlockSparseFlex:
    """An AttentionCore without dropout. attend: flex_attention, compiled or not. others: computes patterns that leave
    no block out."""

    def __init__(self, attend: Callable[..., Any], others: AttentionCore) -> None:
        self._attend, self._others = attend, others

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float) -> Tensor:
        if not isinstance(pattern, BlockSparsePattern):
            return self._others(q, k, v, pattern, dropout)
        assert pattern.chosen is not None
        units = max(pattern.chosen.shape[2], k.shape[2])
        # Query heads that share a choice and a key are heads of one sample, and each such group is a sample of its own:
        # one table of tiles serves them all.
        rows = q.unflatten(2, (units, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)  # [B U, N / U, S, D]
        keys, values = (by_unit(x, units) for x in (k, v))  # [B U, 1, T, D]
        out = self._attend(rows, keys, values, block_mask=block_mask(pattern, units), enable_gqa=rows.shape[1] > 1)
        # [B U, N / U, S, D] -> [B, S, N, D]
        return out.unflatten(0, (len(q), units)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def by_unit(x: Tensor, units: int) -> Tensor:
    """[B, T, G, D] -> [B U, 1, T, D]"""
    x = x.transpose(1, 2).repeat_interleave(units // x.shape[2], 1) if units > x.shape[2] else x.transpose(1, 2)
    return x.flatten(0, 1).unsqueeze(1)


def block_mask(pattern: BlockSparsePattern, units: int) -> BlockMask:
    """The tiles of each of B U groups of heads, and which scores in them count."""
    assert pattern.chosen is not None
    assert pattern.blocks is not None
    blocks, segments = pattern.blocks, pattern.segment_ids
    chosen = pattern.chosen.repeat_interleave(units // pattern.chosen.shape[2], 2)
    chosen = chosen.transpose(1, 2).flatten(0, 1)  # [B U, S, topk]
    words = chosen_words(chosen, blocks.count)
    of_key = blocks.of_key.int()
    of_key = of_key if blocks.is_regular else of_key.repeat_interleave(units, 0)
    tiles = needed_tiles(chosen, blocks, units)  # [B U, tiles of queries, tiles of keys]
    count = tiles.sum(-1, dtype=torch.int32)
    order = tiles.int().sort(dim=-1, descending=True, stable=True).indices.int()
    size, regular = blocks.size, blocks.is_regular
    length, keys = chosen.shape[1], blocks.of_key.shape[1]
    offset = keys - length  # queries are the last of the positions

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = key // size if regular else of_key[b, key]
        kept = (words[b, query, block // WORD] >> (block % WORD)) & 1
        result = (kept == 1) & (key <= query + offset)
        if segments is None:
            return result
        return result & (segments[b // units, query + offset] == segments[b // units, key])

    return BlockMask.from_kv_blocks(
        count.unsqueeze(1),
        order.unsqueeze(1),
        BLOCK_SIZE=TILE,
        mask_mod=seen,
        seq_lengths=(length, keys),
    )


def chosen_words(chosen: Tensor, count: int) -> Tensor:
    """[B, S, topk] -> [B, S, words] int32: bit i of word w stands for block WORD w + i."""
    numbers = chosen.clamp(min=0).long()
    bits = torch.where(chosen >= 0, torch.ones_like(chosen) << (numbers % WORD).int(), 0)
    words = torch.zeros((*chosen.shape[:2], -(-count // WORD)), dtype=torch.int32, device=chosen.device)
    # Each bit is added once, since no block is chosen twice.
    return words.scatter_add_(-1, numbers // WORD, bits)


def needed_tiles(chosen: Tensor, blocks: KeyBlocks, units: int) -> Tensor:
    """[B U, tiles of queries, tiles of keys] bool: whether a query of the tile attends to a block that the tile of keys
    has a part of."""
    groups, length, _ = chosen.shape
    keys = blocks.of_key.shape[1]
    first, last = tiles_of_blocks(blocks)  # [B or 1, count]
    rows, columns = -(-length // TILE), -(-keys // TILE)
    padded = torch.nn.functional.pad(chosen, (0, 0, 0, rows * TILE - length), value=-1)
    padded = padded.unflatten(1, (rows, TILE)).flatten(2).long()  # [B U, rows, TILE topk]
    needed = torch.zeros((groups, rows, columns + 1), dtype=torch.bool, device=chosen.device)
    samples = 1 if blocks.is_regular else units
    first, last = (x.repeat_interleave(samples, 0).expand(groups, -1) for x in (first, last))
    flat = padded.clamp(min=0).flatten(1)
    for offset in range(-(-blocks.size // TILE) + 1):
        tile = torch.minimum(first.gather(1, flat) + offset, last.gather(1, flat)).view_as(padded)
        # What is not chosen is put in a column of its own, behind all tiles.
        needed.scatter_(-1, tile.where(padded >= 0, columns), True)
    return needed[..., :columns]


def tiles_of_blocks(blocks: KeyBlocks) -> tuple[Tensor, Tensor]:
    """[B or 1, count]: the first and the last tile of keys that each block has a part of."""
    positions = torch.arange(blocks.of_key.shape[1], device=blocks.of_key.device).expand_as(blocks.of_key)
    empty = positions.new_zeros((len(blocks.of_key), blocks.count))
    first = empty.scatter_reduce(1, blocks.of_key, positions, "amin", include_self=False)
    last = empty.scatter_reduce(1, blocks.of_key, positions, "amax", include_self=False)
    return first // TILE, last // TILE
