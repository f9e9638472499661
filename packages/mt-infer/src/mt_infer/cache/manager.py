"""The cache of an engine: memory for sequences, prefixes in common.

Memory of keys and values is divided into blocks of `block_size` positions (`mt_infer.blocks` has their rules). A
sequence has a table of blocks for each group of layers, which are those that need the same positions; block
`position // block_size` of the table holds a position:

    admit      the table begins with the full blocks of a prefix that another sequence computed (same key); none if no
               prefix is in common
    reserve    free blocks are appended for the positions of the next chunk
    computed   blocks that are full now get their keys, so that others find them; those that left a window are released
    release    every block has one user less; without users it is free, and keeps content and key until it is taken
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mt_core._torch_compat import free_cuda_bytes
from mt_core.nn.attention_backends.batch_invariant import KEYS
from mt_core.nn.model import PredictsAhead
from mt_core.parallel.context import ParallelContext
from mt_infer.blocks import BlockPool, BlockTable, Key, OutOfBlocksError, PrefixKeys, shared_counts
from mt_infer.cache.layout import (
    CacheLayout,
    CacheLimits,
    agree,
    blocks_of_sequence,
    cache_layout,
    sizes_within,
    split_memory,
)
from mt_infer.cache.storage import GroupStorage, StateStorage
from mt_infer.config import InferenceConfig

if TYPE_CHECKING:
    from mt_infer.requests import RunningSequence


class CacheManager:
    """Gives memory to sequences and takes it back.

    Recurrent states cannot be cut off at a block's end: a prefix is shared where a snapshot of them was taken.
    """

    def __init__(self, layout: CacheLayout, limits: CacheLimits, device: torch.device, *, share_prefixes: bool) -> None:
        self.layout, self.limits, self.share_prefixes = layout, limits, share_prefixes
        # Snapshots serve shared prefixes alone: without these their memory goes to blocks.
        sizes = sizes_within(layout, limits if share_prefixes else replace(limits, snapshots=0))
        self.pools = [BlockPool(count) for count in sizes.blocks]
        self.storages = [
            GroupStorage(group, count, limits.block_size, device)
            for group, count in zip(layout.groups, sizes.blocks, strict=True)
        ]
        self.states = StateStorage(layout, limits.slots, device) if layout.bytes_per_sequence else None
        # By the key of the block that they follow, the least recently used first.
        self._snapshots: OrderedDict[Key, list[Tensor]] = OrderedDict()
        self._most_snapshots = sizes.snapshots

    @property
    def used_blocks(self) -> int:
        return sum(pool.count - pool.free for pool in self.pools)

    def holds(self, sequences: int, positions: int) -> bool:
        """Whether so many sequences of a length fit at once, whatever they have in common."""
        # Counted against all blocks, not the free ones: other sequences end, or are preempted.
        return all(
            sequences * blocks_of_sequence(group, self.limits, positions) <= pool.count
            for pool, group in zip(self.pools, self.layout.groups, strict=True)
        )

    def new_tables(self) -> list[BlockTable]:
        return [
            # `unread` positions behind the window stay too, for attention that starts at fixed places.
            BlockTable(
                pool, self.limits.block_size, None if group.window is None else group.window + self.limits.unread
            )
            for pool, group in zip(self.pools, self.layout.groups, strict=True)
        ]

    def new_keys(self, root: Key) -> PrefixKeys:
        return PrefixKeys(root, self.limits.block_size)

    def admit(self, sequence: RunningSequence) -> None:
        """Finds the longest prefix that is in the cache, and shares it. Positions of which logits are requested, the
        last among them, are always computed anew. Raises OutOfBlocksError without space for another sequence."""
        # Before anything is taken. A slot is of fixed size, and counted apart from blocks.
        if self.states is not None and not self.states.free:
            raise OutOfBlocksError
        snapshot = None
        if self.share_prefixes:
            # Logits need a forward pass over their position: blocks are adopted up to the last position at most, or to
            # the first whose prompt_logprobs are requested.
            last = len(sequence.tokens) - 1
            first = last if sequence.first_logits is None else min(last, sequence.first_logits)
            # Of full blocks only. After a preemption `tokens` has the generated ones too, whose blocks may still be
            # there.
            keys = sequence.keys.extend(sequence.tokens, first)
            count, snapshot = self._shared(sequence.tables, keys)
            for table in sequence.tables:
                # Every group has these blocks, or those of its window: _shared counted so.
                table.adopt(keys[:count])
            sequence.computed = sequence.cached = count * self.limits.block_size
        if self.states is not None:
            # Zeros, unless a snapshot of the prefix is copied in.
            sequence.slot = self.states.take()
            if snapshot is not None:
                self.states.restore(sequence.slot, snapshot)

    def reserve(self, sequence: RunningSequence, positions: int) -> None:
        """Memory for so many positions of the sequence. Raises OutOfBlocksError."""
        for table in sequence.tables:
            table.reserve(positions)

    def computed(self, sequence: RunningSequence, positions: int) -> None:
        """So many positions of the sequence are in the cache now."""
        sequence.computed = positions
        if self.share_prefixes:
            # Blocks that are full now get their keys, so that other sequences find them while this one still runs.
            keys = sequence.keys.extend(sequence.tokens, positions)
            for table in sequence.tables:
                self._name(table, keys)
            # Recurrent states hold exactly `positions` positions: a snapshot fits a key only where these end at a
            # block's end.
            if keys and positions == len(keys) * self.limits.block_size:
                self._take_snapshot(sequence, keys[-1])
        for table in sequence.tables:
            # After naming: a block that leaves the window keeps its content and key until it is taken for something
            # else.
            table.leave_window(positions)

    def fork(self, source: RunningSequence, copy: RunningSequence) -> None:
        """Gives `copy`, which has no memory, the computed positions of `source`: full blocks are shared, the last block
        and recurrent states are copied. Raises OutOfBlocksError, and then has taken nothing."""
        # All checks come first, for every group: a fork that failed half way would leave blocks without an owner.
        partial = source.computed % self.limits.block_size > 0
        if (self.states is not None and not self.states.free) or (
            partial and not all(pool.free for pool in self.pools)
        ):
            raise OutOfBlocksError
        # Full blocks are read only from here on. The partial one is written by both sequences next: each has its own
        # copy.
        forks = [table.fork(source.computed) for table in source.tables]
        for storage, (_, copied) in zip(self.storages, forks, strict=True):
            if copied is not None:
                storage.copy_block(*copied)
        copy.tables, copy.computed = [table for table, _ in forks], source.computed
        if self.states is not None and source.slot is not None:
            copy.slot = self.states.take()
            self.states.restore(copy.slot, self.states.snapshot(source.slot))

    def snapshot(self, sequence: RunningSequence) -> list[Tensor] | None:
        """Recurrent states, to `roll_back` to; None where the layers have none."""
        return None if self.states is None or sequence.slot is None else self.states.snapshot(sequence.slot)

    def roll_back(self, sequence: RunningSequence, positions: int, snapshot: list[Tensor] | None) -> None:
        """Only so many positions are in the cache again; with the recurrent states that they left behind."""
        # Blocks stay with the sequence: what is behind `positions` is overwritten by the next pass.
        sequence.computed = positions
        if self.states is not None and sequence.slot is not None and snapshot is not None:
            self.states.restore(sequence.slot, snapshot)

    def release(self, sequence: RunningSequence) -> None:
        """Takes back all memory of the sequence, which may start again from nothing."""
        for table in sequence.tables:
            table.release()
        if self.states is not None and sequence.slot is not None:
            self.states.release(sequence.slot)
        sequence.slot, sequence.computed = None, 0
        sequence.memory.clear()

    def forget_prefixes(self) -> None:
        """The weights have changed."""
        for pool in self.pools:
            pool.forget_all()
        self._snapshots.clear()

    def chunk_end(self, sequence: RunningSequence, end: int) -> int:
        """The end of a chunk of a prompt, never within a run of the undivided token. Recurrent states are kept at the
        last full block: a chunk ends there."""
        end = self._behind_whole_runs(sequence, end)
        if self.states is None or not self.share_prefixes:
            return end
        # Example, block_size=16: a prompt of 40 tokens is computed to 32, where _take_snapshot copies the states, then
        # to 40.
        full = (len(sequence.tokens) - 1) // self.limits.block_size * self.limits.block_size
        return full if sequence.computed < full < end else end

    def _behind_whole_runs(self, sequence: RunningSequence, end: int) -> int:
        """`end`, or where the run begins that it would cut; the sequence's `computed` for a run that has to wait for a
        pass with more room."""
        token, tokens = self.layout.undivided_token, sequence.tokens
        if token is None or not sequence.request.inputs:
            return end
        # What was generated is never part of an image.
        while sequence.computed < end < sequence.prompt_length and tokens[end - 1] == tokens[end] == token:
            end -= 1
        return end

    def longest_run(self, tokens: Sequence[int]) -> int:
        """Positions of the longest run of the undivided token."""
        runs = [len(list(run)) for token, run in groupby(tokens) if token == self.layout.undivided_token]
        return max(runs, default=0)

    def _name(self, table: BlockTable, keys: Sequence[Key]) -> None:
        # `named` is how far earlier calls have come; a None is a block that has left the window.
        for number in range(table.named, len(keys)):
            block = table.blocks[number]
            if block is not None:
                table.pool.name(block, keys[number])
        table.named = max(table.named, len(keys))

    def _shared(self, tables: Sequence[BlockTable], keys: Sequence[Key]) -> tuple[int, list[Tensor] | None]:
        """Leading blocks in common, and the recurrent states behind them."""
        if self.states is None:
            # Attention alone: the longest count.
            return next(shared_counts(tables, keys), 0), None
        for count in shared_counts(tables, keys):
            # With recurrent layers a shorter prefix, at whose end a snapshot exists.
            if keys[count - 1] in self._snapshots:
                self._snapshots.move_to_end(keys[count - 1])
                return count, self._snapshots[keys[count - 1]]
        return 0, None

    def _take_snapshot(self, sequence: RunningSequence, key: Key) -> None:
        # Of prompts alone, which other requests may begin with; generated text seldom recurs, and would push prompts
        # out.
        in_prompt = sequence.computed < sequence.prompt_length
        if self.states is None or sequence.slot is None or not in_prompt or key in self._snapshots:
            return
        if self._most_snapshots and len(self._snapshots) == self._most_snapshots:
            self._snapshots.popitem(last=False)
        if self._most_snapshots:
            self._snapshots[key] = self.states.snapshot(sequence.slot)


SHARE_OF_FREE = 0.5
"""Part of the free memory that the cache takes, when the configuration does not say."""


def cache_bytes(options: InferenceConfig, device: torch.device) -> int:
    if options.cache_memory_gb is not None:
        return int(options.cache_memory_gb * 2**30)
    return int(free_bytes(device) * SHARE_OF_FREE)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return free_cuda_bytes(device)
    # Pages that are free without reclaiming the page cache: an underestimate, on the safe side.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def repeated_positions(model: nn.Module, options: InferenceConfig) -> int:
    """How many positions before its new ones a sequence computes again, in layers that draft: see
    `mt_infer.speculation.multi_token`."""
    if options.speculative_method != "mtp" or not isinstance(model, PredictsAhead):
        return 0
    return max(min(options.speculative_tokens, model.prediction_depths) - 1, 0)


def build_caches(
    model: nn.Module,
    draft_model: nn.Module | None,
    options: InferenceConfig,
    ctx: ParallelContext,
    max_model_len: int,
    is_batch_invariant: bool = False,
) -> tuple[CacheManager, CacheManager | None]:
    """Collective over the ranks of the model, which get caches of the same size. Raises ConfigError for a memory that
    does not hold one sequence."""
    own_limits = CacheLimits(
        cache_bytes(options, ctx.device),
        options.cache_block_size,
        options.max_requests,
        max_model_len,
        options.max_tokens_per_step,
        unread=(KEYS if is_batch_invariant else 0) + repeated_positions(model, options),
    )
    axis = ctx.axis("model")
    # The order of the collectives is that of the calls: the model first, then the draft model.
    layout, limits = agree(cache_layout(model, options.cache_dtype), own_limits, axis)
    if draft_model is None:
        return CacheManager(layout, limits, ctx.device, share_prefixes=options.prefix_caching), None
    draft_layout, limits = agree(cache_layout(draft_model), limits, axis)
    # Both within cache_memory_gb.
    model_limits, draft_limits = split_memory(limits, (layout, draft_layout))
    return (
        CacheManager(layout, model_limits, ctx.device, share_prefixes=options.prefix_caching),
        CacheManager(draft_layout, draft_limits, ctx.device, share_prefixes=False),
    )
