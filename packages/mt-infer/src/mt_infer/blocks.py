"""Blocks of positions: which are free, which sequences share them, which prefixes they hold, and the block tables of
sequences.

A block is `block_size` consecutive positions of one sequence. Everything else in the cache rests on three rules:

- A block has a number of users: the tables that list it. It is free when that number is 0, and only a free block is
  taken for new content.
- A full block may be shared. Its key is a hash of everything that its values depend on (inputs beside tokens, and all
  tokens up to the block's last), in a cache of one model with one set of weights. A block that is not full has one
  user.
- A free block keeps its content and its key until it is taken for something else, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate

import numpy as np

Key = bytes


def block_key(before: Key, tokens: Sequence[int]) -> Key:
    """Key of a full block. before: the key of the block before it, or of what the sequence depends on beside tokens."""
    # A chain: equal keys mean equal tokens from the beginning on, not only in this block. 128 bits, so that no
    # collision, which would give a sequence another text's values, is to be expected.
    return blake2b(before + np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()


class OutOfBlocksError(Exception):
    """No block is free: a sequence has to be preempted."""


class BlockPool:
    """Counts the users of each block. Blocks are numbers; their content is kept elsewhere."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = [0] * count
        self._keys: dict[int, Key] = {}
        self._of_key: dict[Key, int] = {}
        # Unused blocks, the next to be taken first. Those without content come before those with.
        # [no content, last released first ... content, oldest ... content, released last]
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._unused)

    def take(self, after: int | None = None) -> int:
        """A block for new content. after: the sequence's last block, which the new one follows in memory if it can.

        Raises OutOfBlocksError.
        """
        if not self._unused:
            raise OutOfBlocksError
        # The neighbour in memory makes the sequence's positions one slice, which is read without a copy. It is taken
        # unless this would evict content while a block without content is free.
        block = next(iter(self._unused))
        if after is not None and after + 1 in self._unused and (after + 1 not in self._keys or block in self._keys):
            block = after + 1
        del self._unused[block]
        self._forget(block)
        # Its content is forgotten first: from here on it is overwritten.
        self._users[block] = 1
        return block

    def find(self, key: Key) -> int | None:
        """The block with this content."""
        return self._of_key.get(key)

    def share(self, block: int) -> None:
        """One more user."""
        # Unused, but with content (`find` gave it): it comes back from the list of blocks to be taken.
        if not self._users[block]:
            del self._unused[block]
        self._users[block] += 1

    def release(self, block: int) -> None:
        """One user less."""
        self._users[block] -= 1
        if self._users[block]:
            return
        # At the end: taken last.
        self._unused[block] = None
        if block not in self._keys:
            self._unused.move_to_end(block, last=False)

    def name(self, block: int, key: Key) -> None:
        """The block is full, and has the content of this key. The first block of a key keeps it."""
        # Two sequences may compute the same block at the same time: the second's stays private and unnamed, so that a
        # key has one block. It becomes free without content.
        if key not in self._of_key and block not in self._keys:
            self._keys[block], self._of_key[key] = key, block

    def forget_all(self) -> None:
        """No content can be shared any more: the weights have changed."""
        self._keys.clear()
        self._of_key.clear()

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._of_key[key]


@dataclass
class BlockTable:
    """The blocks of one sequence in one group; None for those that have left the window.

    window: of the group. named: number of leading blocks whose content others may share. changes: how often blocks were
    added, or all released.
    """

    pool: BlockPool
    block_size: int
    window: int | None
    blocks: list[int | None] = field(default_factory=list)
    named: int = 0
    changes: int = 0
    _left: int = 0
    _run: int = 0
    """From this block on, the blocks are consecutive in memory."""

    def reserve(self, positions: int) -> None:
        """Blocks for so many positions in all. Raises OutOfBlocksError, and then has taken none."""
        # Checked against free blocks before the first is taken. Negative or 0: the last block has places left.
        wanted = -(-positions // self.block_size) - len(self.blocks)
        if wanted > self.pool.free:
            raise OutOfBlocksError
        for _ in range(wanted):
            # The block behind the last one in memory if it is free, so that a sequence alone in the cache is one slice.
            self._append(self.pool.take(self.blocks[-1] if self.blocks else None))

    def leave_window(self, computed: int) -> None:
        """Release blocks that no later position reads, once `computed` positions are in the cache."""
        if self.window is None:
            return
        # The next query is at position `computed` and sees keys from computed + 1 - window on. Blocks before that one
        # are full of unread positions. Example, window=100, block_size=16: after 150 positions those before 51 are
        # unread, which are 3 blocks.
        unread = max(computed + 1 - self.window, 0) // self.block_size
        while self._left < min(unread, len(self.blocks)):
            block = self.blocks[self._left]
            if block is not None:
                self.pool.release(block)
                # The entry stays, so that the number of a block in the table is position // block_size.
                self.blocks[self._left] = None
            self._left += 1

    def release(self) -> None:
        # Last blocks first: a prefix outlives what follows it.
        # Released blocks are evicted in this order: a prefix is found from its beginning, and without it the rest is
        # lost.
        for block in reversed(self.blocks):
            if block is not None:
                self.pool.release(block)
        self.blocks.clear()
        self.named = self._left = self._run = 0
        # Static inputs of captured graphs hold a copy of the table, which is outdated now.
        self.changes += 1

    def adopt(self, keys: Sequence[Key]) -> None:
        """Share the blocks with these contents: all of them, or with a window those that are still read."""
        assert not self.blocks
        # Blocks before the window are not needed, and may have been evicted.
        first = self.first_needed(len(keys))
        for number, key in enumerate(keys):
            block = None
            if number >= first:
                block = self.pool.find(key)
                assert block is not None
                self.pool.share(block)
            self._append(block)
        self.named = len(keys)
        self._left = first

    def fork(self, positions: int) -> tuple[BlockTable, tuple[int, int] | None]:
        """A table with the same first positions. Full blocks are shared; a last one that is not full is to be copied,
        from the first to the second of the numbers. Raises OutOfBlocksError, and then has taken none."""
        full, rest = divmod(positions, self.block_size)
        if rest and not self.pool.free:
            raise OutOfBlocksError
        # _append below keeps its `_run`; entries that have left the window are copied as None.
        copy = BlockTable(self.pool, self.block_size, self.window, named=min(self.named, full), _left=self._left)
        for block in self.blocks[:full]:
            if block is not None:
                self.pool.share(block)
            copy._append(block)
        if not rest:
            return copy, None
        last, new = self.blocks[full], self.pool.take()
        assert last is not None
        copy._append(new)
        return copy, (last, new)

    def places(self, first: int, end: int) -> slice | np.ndarray:
        """Where positions first ... end - 1 are in the storage: a slice where they are consecutive.

        Those that have left the window may be anywhere: they are masked.
        """
        size, low = self.block_size, first // self.block_size
        # Consecutive blocks from here to the end of the table: read as a view.
        if low >= self._run:
            block = self.blocks[low]
            assert block is not None
            start = block * size + first % size
            return slice(start, start + end - first)
        blocks = np.array([block or 0 for block in self.blocks[low : -(-end // size)]])  # block numbers
        # [blocks, block_size] places, flattened in the order of positions
        every = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        return every[first - low * size : end - low * size]

    def _append(self, block: int | None) -> None:
        # The run of consecutive blocks starts anew at this block; behind it, for an entry without a block.
        if block is None or (self.blocks and self.blocks[-1] != block - 1):
            self._run = len(self.blocks) + (block is None)
        self.blocks.append(block)
        self.changes += 1

    def place(self, position: int) -> int:
        """Where a position is in the storage."""
        block = self.blocks[position // self.block_size]
        assert block is not None
        return block * self.block_size + position % self.block_size

    def first_needed(self, blocks: int) -> int:
        """The first block that is read by the position behind so many blocks."""
        if self.window is None:
            return 0
        return max(blocks * self.block_size + 1 - self.window, 0) // self.block_size


class PrefixKeys:
    """The keys of the full blocks of a sequence, extended as it grows."""

    def __init__(self, root: Key, block_size: int) -> None:
        self.root, self.block_size = root, block_size
        self.keys: list[Key] = []

    def copy(self) -> PrefixKeys:
        copy = PrefixKeys(self.root, self.block_size)
        copy.keys = list(self.keys)
        return copy

    def extend(self, tokens: Sequence[int], count: int) -> list[Key]:
        """Keys of the full blocks among the first `count` tokens."""
        size = self.block_size
        while (len(self.keys) + 1) * size <= count:
            start = len(self.keys) * size
            # Keys that were made stay valid: tokens are only added.
            before = self.keys[-1] if self.keys else self.root
            self.keys.append(block_key(before, tokens[start : start + size]))
        return self.keys[: count // size]


def shared_counts(tables: Sequence[BlockTable], keys: Sequence[Key]) -> Iterator[int]:
    """The numbers of leading blocks that every group has, the largest first. It takes linear time."""
    for table in tables:
        if table.window is None:
            # Groups of full attention need every block from the first on.
            keys = keys[: _leading(table.pool, keys)]
    # Groups with a window need the last blocks before the position only. Example, window of 2 blocks and blocks 0 1 - 3
    # 4 in the pool: 5 blocks in common are possible (3 and 4 are read), 4 are not (2 and 3 would be).
    runs = [(table, _runs(table.pool, keys)) for table in tables if table.window is not None]
    for count in range(len(keys), 0, -1):
        # The run of blocks that ends at `count` reaches back to the first that is read.
        if all(count - table.first_needed(count) <= run[count - 1] for table, run in runs):
            yield count


def _leading(pool: BlockPool, keys: Sequence[Key]) -> int:
    """How many of the first keys the pool has without a gap."""
    return next((number for number, key in enumerate(keys) if pool.find(key) is None), len(keys))


def _runs(pool: BlockPool, keys: Sequence[Key]) -> list[int]:
    """For each key how many keys up to it the pool has without a gap."""
    return list(accumulate(keys, lambda run, key: 0 if pool.find(key) is None else run + 1, initial=0))[1:]
