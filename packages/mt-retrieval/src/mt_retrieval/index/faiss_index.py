"""Indices of faiss over embeddings, and their folder: `index.faiss` with `index.json`."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import file_digest
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, PluginError
from mt_data.records import Record, StoredFile, read_record, require_unchanged, write_record
from mt_retrieval.embeddings.manifest import Source
from mt_retrieval.embeddings.reader import Embeddings
from mt_retrieval.index.search import SearchResult
from mt_retrieval.provenance import versions

INDEX_FILE, INDEX_RECORD = "index.faiss", "index.json"
IndexType = Literal["flat", "ivf", "pq", "hnsw"]
OnRows = Callable[[int, int], None]
"""(rows added, all rows)"""


class IndexRecord(Record):
    """factory: faiss's description of the index, such as IVF4096,Flat."""

    format: Literal["mt-index"] = "mt-index"
    version: Literal[1] = 1
    factory: str
    source: Source
    dim: int
    count: int
    index: StoredFile
    made_with: dict[str, str]


class FaissIndex:
    """A finished index; raises DataError for a damaged one."""

    def __init__(self, folder: Path, search_parameters: str | None = None) -> None:
        self._record = read_record(folder / INDEX_RECORD, IndexRecord)
        path = require_unchanged(folder, self._record.index, "run mt retrieve index again")
        self._index = faiss().read_index(str(path))
        self.kind = self._record.factory
        self.source: Source | None = self._record.source
        if search_parameters is not None:
            set_parameters(self._index, search_parameters, self.kind)

    def __len__(self) -> int:
        return self._record.count

    @property
    def dim(self) -> int:
        return self._record.dim

    def search(self, questions: NDArray[np.float32], k: int) -> SearchResult:
        scores, rows = self._index.search(np.ascontiguousarray(questions, np.float32), k)
        return SearchResult(scores, rows)


def faiss(instead: str = "give the folder of embeddings in place of an index") -> Any:
    """The module. Raises PluginError where it is not installed. instead: what NumPy searches exactly."""
    try:
        import faiss
    except ImportError as error:
        raise PluginError(
            f'this index needs faiss: pip install "mt-retrieval[faiss]"; without it {instead}, which NumPy searches '
            "exactly"
        ) from error
    return faiss


def factory_of(kind: IndexType, count: int, dim: int, lists: int | None, bytes_: int | None) -> str:
    """faiss's description. lists: of ivf, default 4 sqrt(count). bytes_: of pq's codes, default dim / 4 or the nearest
    divisor below. Raises ConfigError for bytes that do not divide the width."""
    if kind == "flat":
        return "Flat"
    if kind == "hnsw":
        return "HNSW32"
    if kind == "ivf":
        # 4 sqrt(n) lists, the least that faiss's guidelines recommend, and 39 vectors at least for each, below which
        # its training warns.
        return f"IVF{lists or max(1, min(round(4 * sqrt(count)), count // 39))},Flat"
    size = bytes_ or next(size for size in range(max(dim // 4, 1), 0, -1) if dim % size == 0)
    if dim % size:
        raise ConfigError(f"--pq-bytes {size} does not divide the width of the embeddings, {dim}")
    return f"PQ{size}"


def build_index(
    embeddings: Embeddings,
    folder: Path,
    factory: str,
    train_rows: int | None,
    on_rows: OnRows = lambda done, total: None,
) -> IndexRecord:
    """Train the index on the first `train_rows` embeddings (None: all), add all of them, and write it.

    Raises ConfigError for a description that faiss refuses, or too few vectors to train on.
    """
    index = _trained(embeddings, factory, train_rows)
    for matrix in embeddings.shards():
        index.add(matrix.astype(np.float32))
        on_rows(index.ntotal, len(embeddings))
    # Before the file is replaced: a kill between the two leaves no record that belongs to another file.
    (folder / INDEX_RECORD).unlink(missing_ok=True)
    record = IndexRecord(
        factory=factory,
        source=embeddings.manifest.job.source,
        dim=embeddings.dim,
        count=len(embeddings),
        index=write_index(index, folder, INDEX_FILE),
        made_with=versions(),
    )
    write_record(folder / INDEX_RECORD, record)
    return record


def _trained(embeddings: Embeddings, factory: str, train_rows: int | None) -> Any:
    library = faiss()
    try:
        index = library.index_factory(embeddings.dim, factory, library.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            index.train(_first_rows(embeddings, train_rows or len(embeddings)))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].rpartition("failed: ")[2]
        raise ConfigError(
            f"faiss cannot make the index {factory} of {len(embeddings)} embeddings of width {embeddings.dim}: "
            f"{reason}; choose another --type, --lists, --pq-bytes or --factory"
        ) from error
    return index


def _first_rows(embeddings: Embeddings, count: int) -> NDArray[np.float32]:
    parts: list[NDArray[np.float32]] = []
    for matrix in embeddings.shards():
        parts.append(matrix[:count].astype(np.float32))
        count -= len(parts[-1])
        if count <= 0:
            break
    return np.concatenate(parts)


def write_index(index: Any, folder: Path, name: str) -> StoredFile:
    """Readers see the old file or all of the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic within a file system only.
    temporary = folder / f".{name}.{os.getpid()}"
    faiss().write_index(index, str(temporary))
    with temporary.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    temporary.replace(folder / name)
    return StoredFile(name=name, sha256=digest)


def set_parameters(index: Any, parameters: str, kind: str) -> None:
    """Raises ConfigError for parameters that the index does not have. kind: its description."""
    try:
        faiss().ParameterSpace().set_index_parameters(index, parameters)
    except RuntimeError as error:
        raise ConfigError(
            f"--search-parameters {parameters}: the index {kind} does not take them; an IVF takes nprobe=N, an HNSW "
            "efSearch=N"
        ) from error
