"""Union-find over document ids, 8 bytes each; the smallest id stands for its set."""

from __future__ import annotations

import numpy as np

from mt_data.corpora.grouping import Ids


class DisjointSets:
    """`count` sets of one id each, to be united. A parent is never larger than its child."""

    def __init__(self, count: int) -> None:
        self.parent: Ids = np.arange(count, dtype=np.int64)

    def find(self, item: int) -> int:
        """The smallest id of the set that `item` is in; halves the path on the way."""
        parent = self.parent
        while parent[item] != item:
            # Path halving: paths stay short without a second pass and without ranks in memory.
            parent[item] = parent[parent[item]]
            item = int(parent[item])
        return item

    def union(self, one: int, other: int) -> None:
        one, other = self.find(one), self.find(other)
        # The smaller id becomes the root, which keeps "a parent is never larger than its child".
        self.parent[max(one, other)] = min(one, other)

    def flatten(self, chunk: int = 2**20) -> Ids:
        """The smallest id of each id's set. One pass, since parents come before their children."""
        for start in range(0, len(self.parent), chunk):
            rows = self.parent[start : start + chunk]
            while True:
                # Chunks before this one hold roots already; within the chunk chains are shortened until nothing
                # changes.
                above = self.parent[rows]
                if np.array_equal(above, rows):
                    break
                rows[:] = above
        return self.parent
