"""`Index`: search by inner product, exact or of faiss."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import file_digest
from math import sqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError, PluginError
from mt_data.records import Record, StoredFile, read_record, require_unchanged, write_record
from mt_retrieval.embeddings import MANIFEST, Embeddings, Source
from mt_retrieval.encoder import versions


class SearchResult(NamedTuple):
    """scores fp32, rows (of the evidence) int64: [questions, k], the best first; the row -1 where fewer are found."""

    scores: NDArray[np.float32]
    rows: NDArray[np.int64]


class Index(Protocol):
    """source: what is indexed; None where a file does not say it."""

    kind: str
    source: Source | None

    def __len__(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def search(self, questions: NDArray[np.float32], k: int) -> SearchResult:
        """questions: [questions, dim]"""
        ...


# -- exact search with NumPy -------------------------------------------------------------------------

BLOCK_ROWS = 16384
"""Passages whose scores are in memory at a time."""


class ExactIndex:
    """matrices: [rows, dim] each, of any floating-point dtype; one after the other the rows of the evidence."""

    kind = "exact"

    def __init__(self, matrices: Sequence[NDArray[np.floating]], source: Source | None = None) -> None:
        self.matrices, self.source = list(matrices), source

    @classmethod
    def of_embeddings(cls, folder: Path) -> ExactIndex:
        embeddings = Embeddings(folder)
        return cls(list(embeddings.shards()), embeddings.manifest.job.source)

    @classmethod
    def of_file(cls, path: Path) -> ExactIndex:
        """A matrix in NumPy's format, of any origin."""
        return cls([read_matrix(path)])

    def __len__(self) -> int:
        return sum(map(len, self.matrices))

    @property
    def dim(self) -> int:
        return int(self.matrices[0].shape[1])

    def search(self, questions: NDArray[np.float32], k: int) -> SearchResult:
        best = SearchResult(np.zeros((len(questions), 0), np.float32), np.zeros((len(questions), 0), np.int64))
        first = 0
        for matrix in self.matrices:
            for start in range(0, len(matrix), BLOCK_ROWS):
                # Read from the memory map and converted a block at a time: memory is BLOCK_ROWS x (dim + questions)
                # numbers, whatever the evidence.
                block = matrix[start : start + BLOCK_ROWS].astype(np.float32)
                best = _merged(best, _best_of_block(self.scores(questions, block), k, first + start), k)
            first += len(matrix)
        return best

    def scores(self, questions: NDArray[np.float32], block: NDArray[np.float32]) -> NDArray[np.float32]:
        """[questions, rows of the block], higher for what is nearer."""
        return questions @ block.T


class ExactL2Index(ExactIndex):
    """By distance: a score is the question's squared norm less the squared distance."""

    kind = "exact, L2"

    def scores(self, questions: NDArray[np.float32], block: NDArray[np.float32]) -> NDArray[np.float32]:
        # Since |q|^2 - |q - b|^2 = 2 q.b - |b|^2; |q|^2 is the same for all rows, so that the order is that of the
        # distances.
        scores: NDArray[np.float32] = questions @ block.T
        scores *= 2
        scores -= np.square(block).sum(1)
        return scores


def read_matrix(path: Path) -> NDArray[np.floating]:
    """Mapped into memory. Raises DataError for a file that is no matrix of numbers in NumPy's format."""
    try:
        matrix = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is no array in NumPy's format: {error}") from error
    if matrix.ndim != 2 or matrix.dtype.kind != "f":
        raise DataError(f"{path} holds {matrix.dtype} of shape {list(matrix.shape)}; embeddings are a matrix of floats")
    return matrix


def _best_of_block(scores: NDArray[np.float32], k: int, first: int) -> SearchResult:
    """The k best in any order, of scores [questions, rows from `first`]. Which of several with the k-th score are kept
    is not defined."""
    count = scores.shape[1]
    if count <= k:
        return SearchResult(scores, np.broadcast_to(np.arange(first, first + count), scores.shape))
    # Linear in the number of rows; only the k that are left are sorted.
    # Of the negated scores, as NaN is sorted last.
    kept = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    return SearchResult(np.take_along_axis(scores, kept, 1), kept + first)


def _merged(a: SearchResult, b: SearchResult, k: int) -> SearchResult:
    """The k best of both; of equal scores the lower row first."""
    scores, rows = np.concatenate([a.scores, b.scores], 1), np.concatenate([a.rows, b.rows], 1)
    # The last key is the first to count: scores, then rows.
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return SearchResult(np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1))


# -- faiss: `index.faiss` with `index.json` ----------------------------------------------------------

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


# -- opening by path ---------------------------------------------------------------------------------


def open_index(path: Path, search_parameters: str | None = None) -> Index:
    """An index of faiss, a folder of embeddings, or a matrix in NumPy's format.

    Raises DataError for another path, ConfigError for search_parameters of an exact index.
    """
    if (path / INDEX_RECORD).is_file():
        return FaissIndex(path, search_parameters)
    if search_parameters is not None:
        raise ConfigError(f"--search-parameters are those of an index of faiss; {path} is searched exactly")
    if (path / MANIFEST).is_file():
        return ExactIndex.of_embeddings(path)
    if path.suffix == ".npy":
        return ExactIndex.of_file(path)
    raise DataError(
        f"{path} is no index: give a folder that mt retrieve embed or mt retrieve index has written, or a .npy file of "
        "embeddings in the order of the evidence"
    )
