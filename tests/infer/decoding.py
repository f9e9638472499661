"""Logits of given tokens, computed in pieces through the engine's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from mt_core.nn.model import as_generator
from mt_core.parallel.context import ParallelContext
from mt_infer.cache.batch import CachedBatch, Chunk
from mt_infer.cache.layout import CacheLimits, cache_layout
from mt_infer.cache.manager import CacheManager
from mt_infer.requests import Request, RunningSequence
from mt_infer.runner import ModelRunner
from mt_infer.sampling.parameters import SamplingParameters

Inputs = Mapping[str, Tensor]


def new_manager(
    model: nn.Module, sequences: int, length: int, block_size: int = 4, cache_dtype: str = "auto"
) -> CacheManager:
    limits = CacheLimits(2**26, block_size, sequences, length, sequences * length)
    return CacheManager(cache_layout(model, cache_dtype), limits, torch.device("cpu"), share_prefixes=False)


def sequence_of(model: nn.Module, manager: CacheManager, row: Tensor, inputs: Inputs) -> RunningSequence:
    request = Request(0, tuple(row.tolist()), SamplingParameters(), inputs)
    conditioning = as_generator(model).condition(inputs) if inputs else {}
    tables, keys = manager.new_tables(), manager.new_keys(b"")
    sequence = RunningSequence(request, 0, 0, len(row), tables, keys, row.tolist(), conditioning=conditioning)
    manager.admit(sequence)
    manager.reserve(sequence, len(row))
    return sequence


@torch.no_grad()
def cached_logits(
    model: nn.Module,
    tokens: Tensor,
    ends: Sequence[int],
    inputs: Sequence[Inputs] = (),
    block_size: int = 4,
    cache_dtype: str = "auto",
) -> Tensor:
    """Logits [B, S, V] of tokens [B, S]: a forward pass up to each end, of all rows together.

    inputs: what each row is conditioned by.
    """
    manager = new_manager(model, *tokens.shape, block_size, cache_dtype)
    runner = ModelRunner(model, ParallelContext())
    each = inputs or [{}] * len(tokens)
    rows = [sequence_of(model, manager, row, own) for row, own in zip(tokens, each, strict=True)]
    pieces = []
    for start, end in pairwise((0, *ends)):
        chunks = [Chunk(row, start, end - start, end - start) for row in rows]
        logits = runner.logits(CachedBatch(chunks, manager, torch.device("cpu")))
        assert logits is not None
        pieces.append(logits.unflatten(0, (len(rows), -1)))
    return torch.cat(pieces, dim=1)


def in_pieces(length: int, first: int) -> list[int]:
    """Ends: several tokens, two, then one by one."""
    return [first, *range(first + 2, length + 1)]
