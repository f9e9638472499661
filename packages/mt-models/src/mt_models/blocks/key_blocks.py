"""Blocks of keys, and which of them a query attends to (MiniMax-M3, 2026).

Keys are taken in blocks of `size`, counted from the first position of their document. For a query at the position t
with the heads q_h [D] of an indexer, and its keys k_s [D], one for all heads:

    score of a block = max of q_h . k_s over the keys s <= t of the block, in the document of t

A query attends to the `topk` blocks with the highest scores, among them its own block and those before it, `local` in
all; each head of the indexer chooses for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.batch_invariance import is_batch_invariant

PRODUCTS_AT_ONCE = 2**26
"""Products of queries and keys, over all heads, that are in memory at a time (fp32)."""
COLUMNS = 64
"""Keys of one product where results may not depend on the number of keys."""


@dataclass(frozen=True)
class KeyBlocks:
    """Blocks of T keys. of_key, oldest [B or 1, T] int64: the block of each position, and the first one of its
    document. count: number of blocks. size: keys of a block. is_regular: one document, whose blocks begin at multiples
    of size."""

    of_key: Tensor
    oldest: Tensor
    count: int
    size: int
    is_regular: bool

    def at(self, values: Tensor, positions: Tensor) -> Tensor:
        """values [B or 1, T] at positions [B or 1, S] -> [B or 1, S]"""
        rows = max(len(values), len(positions))
        return values.expand(rows, -1).gather(1, positions.expand(rows, -1))


@dataclass(frozen=True)
class Selection:
    """How many blocks of `size` keys a query attends to, its own and the `local` - 1 before it always among them."""

    size: int
    topk: int
    local: int

    def keeps_all(self, keys: int) -> bool:
        """Whether no block of so many keys is left out."""
        return -(-keys // self.size) <= self.topk


def key_blocks(keys: int, size: int, segment_ids: Tensor | None, device: torch.device) -> KeyBlocks:
    """The blocks of `keys` positions. segment_ids [B, T]: documents, as in AttentionPattern. With these their number is
    read from the device."""
    positions = torch.arange(keys, device=device)[None]
    if segment_ids is None:
        return KeyBlocks(positions // size, torch.zeros_like(positions), -(-keys // size), size, is_regular=True)
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = torch.where(begins, positions, 0).cummax(1).values  # [B, T]: where the document of each position begins
    of_key = ((positions - first) % size == 0).cumsum(1) - 1
    return KeyBlocks(of_key, of_key.gather(1, first), int(of_key.max()) + 1, size, is_regular=False)


@torch.no_grad()
def choose_blocks(queries: Tensor, keys: Tensor, positions: Tensor, blocks: KeyBlocks, selection: Selection) -> Tensor:
    """queries [B, S, H, D] at positions [B or 1, S] among keys [B, T, D] -> [B, S, H, topk] int32: the chosen blocks,
    -1 where a query sees fewer."""
    batch, _, heads, _ = queries.shape
    rows = max(PRODUCTS_AT_ONCE // (batch * heads * keys.shape[1]), 1)
    parts = zip(queries.split(rows, 1), positions.split(rows, 1), strict=True)
    chosen = [_choose(q, keys, at, blocks, selection) for q, at in parts]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, 1)


def _choose(queries: Tensor, keys: Tensor, positions: Tensor, blocks: KeyBlocks, selection: Selection) -> Tensor:
    scores = _block_scores(queries, keys, positions, blocks)  # [B, S, H, count]
    query_block, oldest = (blocks.at(values, positions)[..., None, None] for values in (blocks.of_key, blocks.oldest))
    if not blocks.is_regular:
        numbers = torch.arange(blocks.count, device=scores.device)
        scores = scores.masked_fill_(numbers < oldest, float("-inf"))
    for back in range(selection.local):
        scores.scatter_(-1, (query_block - back).maximum(oldest).expand(*scores.shape[:3], 1), float("inf"))
    highest = scores.topk(min(selection.topk, blocks.count), dim=-1)
    chosen = highest.indices.masked_fill(highest.values == float("-inf"), -1).int()
    return F.pad(chosen, (0, selection.topk - chosen.shape[-1]), value=-1)


def _block_scores(queries: Tensor, keys: Tensor, positions: Tensor, blocks: KeyBlocks) -> Tensor:
    """[B, S, H, count]: of each block the largest product with a key that the query sees; -inf where it sees none."""
    products = _products(queries, keys)  # [B, S, H, T]
    later = torch.arange(keys.shape[1], device=keys.device) > positions[..., None]  # [B or 1, S, T]
    products = products.masked_fill_(later.unsqueeze(2), float("-inf"))
    if blocks.is_regular:
        filled = F.pad(products, (0, blocks.count * blocks.size - keys.shape[1]), value=float("-inf"))
        return filled.unflatten(-1, (blocks.count, blocks.size)).amax(-1)
    scores = products.new_full((*products.shape[:3], blocks.count), float("-inf"))
    numbers = blocks.of_key[:, None, None].expand_as(products)
    return scores.scatter_reduce_(-1, numbers, products, "amax")


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """[B, S, H, D], [B, T, D] -> [B, S, H, T] in fp32"""
    rows, columns = queries.float().flatten(1, 2), keys.float().mT
    if is_batch_invariant():
        # From the first key on in products of one size, as batch-invariant attention takes them: a product's order of
        # additions may depend on the number of its columns.
        filled = F.pad(columns, (0, -keys.shape[1] % COLUMNS))
        parts = [torch.bmm(rows, part.contiguous()) for part in filled.split(COLUMNS, -1)]
        products = torch.cat(parts, -1)[..., : keys.shape[1]].contiguous()
    else:
        products = torch.bmm(rows, columns)
    return products.unflatten(1, queries.shape[1:3])
