"""Defaults of `mt retro`; Megatron's, where it has them."""

from __future__ import annotations

SPLIT = "969, 30, 1"
CHUNK_LENGTH = 64
DOCUMENTS_OF_BLOCK = 100_000
ROWS_OF_BLOCK = 8192
"""Chunks that are embedded, or whose neighbours are found: what a killed run may lose on each rank."""
BATCH_SIZE = 128
NUM_NEIGHBORS = 20
NUM_NEIGHBORS_QUERY = 200
EXACT = "exact"
