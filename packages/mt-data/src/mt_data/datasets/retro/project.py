"""The folder of a Retro project: where its files are, and the manifests of what training reads.

PROJECT/db/         chunks.npy, manifest.json
PROJECT/query/TEXT/ neighbors.npy, manifest.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mt_core.errors import ConfigError, DataError
from mt_data.datasets.cache import combined
from mt_data.datasets.retro.config import RetroDataConfig
from mt_data.datasets.splits import parse_split
from mt_data.indexed.dataset import IndexedDataset
from mt_data.records import BlockedFile, Record, read_record

MANIFEST = "manifest.json"
CHUNKS, NEIGHBORS = "chunks.npy", "neighbors.npy"
FINGERPRINT_DIGITS = 8
"""Hexadecimal digits of a text's fingerprint in the name of the folder of its neighbours."""


class Text(Record):
    """An indexed dataset. fingerprint: of its content. documents: its sequences, each of which is one."""

    fingerprint: str
    documents: int

    def __str__(self) -> str:
        return f"{self.fingerprint} of {self.documents} documents"


class DatabaseJob(Record):
    """What the chunks depend on. split: shares of train, valid and test of the documents of each text, of which train
    is searched. deduplicate: whether chunks of equal content are kept once. block_documents: documents of a block."""

    texts: tuple[Text, ...]
    tokenizer: str
    chunk_length: int
    split: str
    deduplicate: bool
    block_documents: int

    def train_documents(self, text: int) -> int:
        """The documents 0, 1, ... of a text that are searched."""
        return parse_split(self.split, "--split").range_of("train", self.texts[text].documents).stop


class ChunkCounts(Record):
    """cut: of all documents. blank: left out, since their text is white space. held_out: of validation and test
    documents. also_held_out: of training documents, left out since a held-out chunk has their content. duplicates:
    left out, with deduplicate. kept: in the database."""

    cut: int
    blank: int
    held_out: int
    also_held_out: int
    duplicates: int
    kept: int


class DatabaseManifest(Record):
    """prefixes: where the texts are. tokenizer: type, config and fingerprint. chunks: None until the job is complete;
    then uint32 [kept, 4], of each chunk the text, the document, its first token in the document, and its tokens."""

    format: Literal["mt-retro-database"] = "mt-retro-database"
    version: Literal[1] = 1
    job: DatabaseJob
    prefixes: tuple[str, ...]
    tokenizer: dict[str, Any] = Field(default_factory=dict)
    counts: ChunkCounts | None = None
    chunks: BlockedFile | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the chunks and the texts: the same wherever they are."""
        assert self.chunks is not None
        return combined([self.chunks.sha256, [text.fingerprint for text in self.job.texts], self.job.chunk_length])


class NeighborsJob(Record):
    """What the neighbours depend on: fingerprints of the text, the database and the index, and the search.

    exclude_sequence_length: tokens of the samples whose documents give none of their chunks a neighbour; None: only
    those of the chunk itself give none. num_neighbors: kept of num_neighbors_query found ones.
    """

    text: Text
    database: str
    index: str
    chunk_length: int
    exclude_sequence_length: int | None
    num_neighbors: int
    num_neighbors_query: int
    search_parameters: str | None
    block_rows: int
    count: int


class NeighborsManifest(Record):
    """prefix: where the text is. neighbors: None until the job is complete; then int64 [count, num_neighbors], row j of
    the chunk of tokens j chunk_length ... of the text."""

    format: Literal["mt-retro-neighbors"] = "mt-retro-neighbors"
    version: Literal[1] = 1
    job: NeighborsJob
    prefix: str
    neighbors: BlockedFile | None = None


def database_folder(project: Path) -> Path:
    return project / "db"


def neighbors_folder(project: Path, prefix: str, fingerprint: str) -> Path:
    return project / "query" / f"{Path(prefix).name}_{fingerprint[:FINGERPRINT_DIGITS]}"


def read_database(folder: Path) -> DatabaseManifest:
    """Raises DataError for a folder that is none, or not complete."""
    if not (folder / MANIFEST).exists():
        raise DataError(
            f"{folder.parent} holds no Retro database: there is no {folder / MANIFEST}; run mt retro db build"
        )
    manifest = read_record(folder / MANIFEST, DatabaseManifest)
    if manifest.chunks is None:
        raise DataError(f"{folder} is not complete; run the same mt retro db build again, which finishes it")
    return manifest


def read_neighbors(folder: Path) -> NeighborsManifest:
    """Raises DataError for a folder that is none, or not complete."""
    manifest = read_record(folder / MANIFEST, NeighborsManifest)
    if manifest.neighbors is None:
        raise DataError(f"{folder} is not complete; run the same mt retro query again, which finishes it")
    return manifest


# data.retro_project_dir: which files of a project the other keys would name.


def with_project_paths(config: RetroDataConfig) -> RetroDataConfig:
    """With the text, the database and the neighbours of data.retro_project_dir, if that is given.

    Raises ConfigError for keys that say the same twice, and DataError for a project without neighbours of the text.
    """
    if config.retro_project_dir is None:
        return config
    for key in ("retro_database_path", "retro_neighbors_path"):
        if getattr(config, key) is not None:
            raise ConfigError(f"data.retro_project_dir={config.retro_project_dir} names data.{key} too; leave out one")
    project = Path(config.retro_project_dir)
    prefix = config.data_path or _only_text(project)
    paths = {
        "data_path": prefix,
        "retro_database_path": str(database_folder(project)),
        "retro_neighbors_path": str(_neighbors_of(project, prefix)),
    }
    return config.model_copy(update=paths)


def _only_text(project: Path) -> str:
    prefixes = read_database(database_folder(project)).prefixes
    if len(prefixes) > 1:
        raise ConfigError(
            f"data.retro_project_dir={project} has {len(prefixes)} texts; name one of them as data.data_path: "
            + ", ".join(prefixes)
        )
    return prefixes[0]


def _neighbors_of(project: Path, prefix: str) -> Path:
    """The folder of the text with this content, whatever its name was."""
    # The content identifies the folder, so a text that was moved or renamed still finds its neighbours.
    digits = IndexedDataset(prefix).fingerprint()[:FINGERPRINT_DIGITS]
    manifests = sorted(project.glob(f"query/*_{digits}/{MANIFEST}"))
    if not manifests:
        others = ", ".join(sorted(path.parent.name for path in project.glob(f"query/*/{MANIFEST}"))) or "none"
        raise DataError(
            f"data.retro_project_dir={project} has no neighbours of {prefix} with the content {digits}... (it has: "
            f"{others}); run mt retro query {project} --text {prefix}"
        )
    return manifests[0].parent
