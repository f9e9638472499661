"""Several conversations in one sample: best-fit decreasing bin packing, deterministic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Packing:
    """Pack p holds the items `items[bounds[p] : bounds[p + 1]]`; int64, bounds [packs + 1]."""

    items: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def of(self, pack: int) -> NDArray[np.int64]:
        return self.items[self.bounds[pack] : self.bounds[pack + 1]]

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        return {"items": self.items, "bounds": self.bounds}


def pack_best_fit(lengths: NDArray[np.integer], capacity: int) -> Packing:
    """Put items of 1 to `capacity` positions into packs of at most `capacity`, each item once.

    Longest first, each into the fullest pack that has room for it, equal ones in their order. Within a pack
    items stand in the order of their numbers. Needs at most 11/9 of the fewest possible packs, and one.
    """
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"lengths must be within 1..{capacity}, are {lengths.min()}..{lengths.max()}")
    packs: list[list[int]] = []
    # with_room[r]: packs with exactly r free positions, the latest last.
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r is set when some pack has exactly r free positions.
    rooms = 0
    for item in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[item])
        # Bits of the rooms that are at least `length`; the lowest one is the fullest pack that fits. One Python integer
        # of capacity + 1 bits replaces a search tree.
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            pack = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(item)
        with_room[room - length].append(pack)
        rooms |= 1 << (room - length)
    return _packing(packs)


def pack_singly(count: int) -> Packing:
    """Each of `count` items in a pack of its own."""
    return Packing(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


def _packing(packs: list[list[int]]) -> Packing:
    sizes = np.array([len(pack) for pack in packs], np.int64)
    items = np.array([item for pack in packs for item in sorted(pack)], np.int64)
    return Packing(items, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))
