"""Opens an index by its path."""

from __future__ import annotations

from pathlib import Path

from mt_core.errors import ConfigError, DataError
from mt_retrieval.embeddings.manifest import MANIFEST
from mt_retrieval.index.exact import ExactIndex
from mt_retrieval.index.faiss_index import INDEX_RECORD, FaissIndex
from mt_retrieval.index.search import Index


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
