"""Attention of one query of each sequence to its keys and values in a paged cache.

B sequences, N query heads, G key-value groups (G divides N), M blocks of a table. Queries are [B, N, D], keys
[places, G, D], values [places, G, V], where a place is block * block_size + offset; the result is [B, N, V].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.nn.cache import PagedScores


@dataclass(frozen=True)
class PageTable:
    """Which blocks hold the positions of each sequence.

    blocks: [B, M] int32, in the order of positions. positions: [B] int64, of the queries: the last position of each.
    places: of each sequence, the places of the positions that its query sees, as the host knows them.
    """

    blocks: Tensor
    positions: Tensor
    block_size: int
    places: Sequence[slice | Tensor] = ()


PagedAttention = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Tensor, PageTable, PagedScores], Tensor]
"""(queries, keys, values, table, scores) -> [B, N, V]. Several queries and keys: their products are added."""


def plain_paged_attention(
    queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], values: Tensor, table: PageTable, scores: PagedScores
) -> Tensor:
    """In plain torch, over all positions that the table has room for. The softmax is computed in fp32."""
    # The reference of the Triton kernel, and its replacement where Triton does not run. It gathers M * block_size keys
    # of every sequence, computed or not: shapes do not depend on lengths. Masked ones weigh 0.
    offsets = torch.arange(table.block_size, device=values.device)
    places = (table.blocks.long()[..., None] * table.block_size + offsets).flatten(1)  # [B, T]
    groups = values.shape[1]  # G
    products = sum(
        # query [B, N, D] -> [B, G, N / G, D]; key[places] [B, T, G, D]. fp32 before the products are added and the
        # softmax is taken.
        torch.einsum("bgnd,btgd->bgnt", query.unflatten(1, (groups, -1)), key[places]).float()
        for query, key in zip(queries, keys, strict=True)
    )
    assert isinstance(products, Tensor)
    distance = table.positions[:, None] - torch.arange(places.shape[1], device=values.device)  # [B, T]
    weights = _weights(products, distance, scores).to(values.dtype)  # [B, G, N / G, T]
    return torch.einsum("bgnt,btgv->bgnv", weights, values[places]).flatten(1, 2)  # [B, N, V]


def paged_attention_by_row(
    queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], values: Tensor, table: PageTable, scores: PagedScores
) -> Tensor:
    """One sequence after the other, over the positions that it has: for a CPU, where shapes may change."""
    groups, size = values.shape[1:]
    out = values.new_empty(len(queries[0]), groups, queries[0].shape[1] // groups, size)  # [B, G, N / G, V]
    if len(queries) == 1 and (scores.softcap, scores.slopes, scores.sinks) == (None, None, None):
        _attend_plainly((queries[0] * scores.scale).unflatten(1, (groups, -1)), keys[0], values, table.places, out)
    else:
        for row, places in enumerate(table.places):
            read = tuple(key[places] for key in keys)
            out[row] = _attend_row(tuple(query[row] for query in queries), read, values[places], scores)
    return out.flatten(1, 2)


def _attend_plainly(queries: Tensor, keys: Tensor, values: Tensor, rows: Sequence[slice | Tensor], out: Tensor) -> None:
    """queries [B, G, N / G, D], scaled; keys [places, G, D], values [places, G, V] -> out [B, G, N / G, V]"""
    for query, places, row_out in zip(queries.unbind(0), rows, out.unbind(0), strict=True):
        # [G, N / G, D] x [G, D, T] -> [G, N / G, T]
        weights = torch.bmm(query, keys[places].permute(1, 2, 0)).softmax(-1)
        torch.bmm(weights, values[places].transpose(0, 1), out=row_out)


def _attend_row(queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], values: Tensor, scores: PagedScores) -> Tensor:
    """queries [N, D], keys [T, G, D], values [T, G, V] -> [G, N / G, V]"""
    products = sum(
        torch.einsum("gnd,tgd->gnt", query.unflatten(0, (values.shape[1], -1)), key).float()
        for query, key in zip(queries, keys, strict=True)
    )
    assert isinstance(products, Tensor)
    distance = torch.arange(len(values) - 1, -1, -1)[None]  # [1, T]; the query is at the last position
    weights = _weights(products[None], distance, scores)[0].to(values.dtype)
    return torch.einsum("gnt,tgv->gnv", weights, values)


def _weights(products: Tensor, distance: Tensor, scores: PagedScores) -> Tensor:
    """products [B, G, N / G, T], distance of each key [B, T] -> the softmax, 0 for keys that are not seen."""
    logits = products * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if scores.slopes is not None:
        slopes = scores.slopes.float().unflatten(0, (logits.shape[1], -1))  # [G, N / G]
        logits = logits - slopes[..., None] * distance[:, None, None]
    # distance < 0: places of the table behind the last position.
    unseen = distance < 0 if scores.window is None else (distance < 0) | (distance >= scores.window)
    logits = logits.masked_fill(unseen[:, None, None], float("-inf"))
    if scores.sinks is None:
        return logits.softmax(-1)
    # One more score for each head without a value: it takes its part of the softmax (attention sinks, as in gpt-oss).
    sinks = scores.sinks.float().unflatten(0, (logits.shape[1], -1))[None, ..., None].expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
