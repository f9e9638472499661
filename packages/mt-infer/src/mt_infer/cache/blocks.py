"""Blocks of positions: which are free, which sequences share them, and which prefixes they hold.

A block is `block_size` consecutive positions of one sequence. Blocks that are full can be shared: their key is a hash
of everything that the values in them depend on (inputs beside tokens, all tokens up to the block's last), in a cache of
one model with one set of weights. A block that nobody uses keeps its content until it is needed for something else,
oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

Key = bytes


def block_key(before: Key, tokens: Sequence[int]) -> Key:
    """Of a full block: `before` is the key of the block before it, or of what the sequence depends on beside tokens."""
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
