"""Reads a folder of embeddings; each file is compared with its hash before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.records import read_record, require_unchanged
from mt_retrieval.embeddings.manifest import MANIFEST, Manifest

CURE = "run the same mt retrieve embed again, which replaces it"


class Embeddings:
    """Raises DataError for a folder that is incomplete or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_record(folder / MANIFEST, Manifest)
        if not self.manifest.is_complete:
            raise DataError(f"{folder} is not complete; run the same mt retrieve embed again, which finishes it")

    def __len__(self) -> int:
        return self.manifest.job.count

    @property
    def dim(self) -> int:
        assert self.manifest.dim is not None
        return self.manifest.dim

    def shards(self) -> Iterator[NDArray[np.float16]]:
        """Mapped into memory: [rows, dim] each, in the order of the evidence."""
        for shard in self.manifest.shards:
            # Hashed as it is reached, not all shards at the opening.
            path = require_unchanged(self.folder, shard.embeddings, CURE)
            matrix = np.load(path, mmap_mode="r", allow_pickle=False)
            if matrix.shape != (shard.rows, self.dim):
                raise DataError(f"{path} has the shape {list(matrix.shape)}, the manifest has {[shard.rows, self.dim]}")
            yield matrix
