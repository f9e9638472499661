"""Vectors of runs of tokens, without a trained encoder: feature hashing (Weinberger et al., 2009)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from mt_retrieval.retro.blocks import Share
from mt_retrieval.retro.ranks import share_of_world

RUNS = (1, 2, 3)
"""Tokens of the runs that are counted."""
WIDTH = 512
BATCH = 1024


class HashedNgrams:
    """Each run of tokens adds 1 or -1 to a place of the vector that its hash chooses; then the signed root of each
    place is taken, so that a run that is repeated in a chunk counts less, and the vector is made of length 1.

    The nearest chunks have the most runs in common. Chunks are similar only where they have the same tokens.
    """

    name = "hashed-ngrams"
    fingerprint = sha256(f"{name} 1 {RUNS} {WIDTH}".encode()).hexdigest()

    def __init__(self) -> None:
        self.settings: dict[str, int | str] = {}
        self.share: Share = share_of_world()

    def vectors(self, chunks: Sequence[NDArray[np.int64]], on_rows: Callable[[int], None]) -> NDArray[np.float32]:
        parts = [np.zeros((0, WIDTH), np.float32)]
        for first in range(0, len(chunks), BATCH):
            parts.append(_normalized(_counts(chunks[first : first + BATCH])))
            on_rows(min(first + BATCH, len(chunks)))
        return np.concatenate(parts)


def _counts(chunks: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
    """[chunks, WIDTH]"""
    longest = max(map(len, chunks))
    tokens = np.zeros((len(chunks), longest), np.uint64)  # 0 is no token here
    for row, chunk in enumerate(chunks):
        tokens[row, : len(chunk)] = chunk + 1
    # RandomState's stream is frozen across versions of NumPy: vectors of a project are the same everywhere.
    # `fingerprint` has a version number for changes here.
    random = np.random.RandomState(0)
    # Odd factors modulo 2^64, one for each place of a run.
    factors = random.randint(0, 2**62, max(RUNS)).astype(np.uint64) * np.uint64(2) + np.uint64(1)
    counts = np.zeros(len(chunks) * WIDTH, np.float64)
    for run in (run for run in RUNS if run <= longest):
        windows = np.lib.stride_tricks.sliding_window_view(tokens, run, axis=1)
        # windows [chunks, longest - run + 1, run]. + run: equal numbers in runs of other lengths are other hashes.
        hashes = _mixed((windows * factors[:run]).sum(-1, dtype=np.uint64) + np.uint64(run))
        # Windows whose last token is padding are not in the chunk.
        rows, places = np.nonzero(windows[..., -1])
        chosen = hashes[rows, places]
        # The highest bit gives the sign, so that collisions cancel in expectation; the lowest 9 bits the place.
        signs = 1.0 - 2.0 * (chosen >> np.uint64(63)).astype(np.float64)
        # Sums of 1 and -1 in fp64 are exact in any order.
        counts += np.bincount(rows * WIDTH + (chosen % np.uint64(WIDTH)).astype(np.int64), signs, len(counts))
    return counts.reshape(len(chunks), WIDTH).astype(np.float32)


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al., 2014): all bits depend on all bits."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _normalized(counts: NDArray[np.float32]) -> NDArray[np.float32]:
    roots = np.sign(counts) * np.sqrt(np.abs(counts))
    norms = np.linalg.norm(roots, axis=1, keepdims=True)
    # 1e-6: a chunk whose runs cancel has the vector 0, not NaN.
    vectors: NDArray[np.float32] = roots / np.maximum(norms, np.float32(1e-6))
    return vectors
