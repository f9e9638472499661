"""Token files with a chunk database and the neighbours of each chunk."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.opening import open_tokens
from mt_data.datasets.retro.config import RetroDataConfig
from mt_data.datasets.retro.database import (
    CheckedRows,
    ChunkDatabase,
    Database,
    Rows,
    StreamDatabase,
    TokenStream,
    open_chunks,
)
from mt_data.datasets.retro.dataset import Retrieval, RetroDataset, items_of, retro_dataset
from mt_data.datasets.retro.project import MANIFEST, NEIGHBORS, read_database, read_neighbors, with_project_paths
from mt_data.datasets.samples import SampleRules
from mt_data.datasets.splits import parse_split
from mt_data.records import BlockedFile

DEFAULT_SPLIT = "969, 30, 1"


def build_retro_files(config: RetroDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> RetroDataset | None:
    """Samples of RETRO_SAMPLE; None for a split without data.

    Raises ConfigError for files that are not named and DataError for files that do not fit one another.
    """
    config = with_project_paths(config)
    for key in ("data_path", "retro_neighbors_path"):
        if getattr(config, key) is None:
            raise ConfigError(f'data.dataset_type="retro" needs data.{key}; docs/models/retro.md has the format')
    text = _open(str(config.data_path), config, tokenizer)
    database = open_database(config, tokenizer, text)
    items = items_of_split(config, request, text, database)
    if items is None:
        return None
    chunks = len(text) // config.retro_chunk_length
    file = neighbors_file(config, request.sequence_length, text, database)
    numbers = open_neighbors(file, chunks, config.retro_num_neighbors, config.verify_checksums)
    rules = SampleRules.of(config, tokenizer)
    retrieval = Retrieval(
        numbers, database, config.retro_chunk_length, config.retrieved_length, rules.vocab_size, file.fingerprint
    )
    return retro_dataset(text, items, config, request, rules, retrieval)


def open_database(config: RetroDataConfig, tokenizer: Tokenizer, text: TokenStream) -> Database:
    """The folder or the token files of data.retro_database_path. Raises DataError for chunks of another length."""
    path = config.retro_database_path
    if path is None or not (folder := Path(path)).joinpath(MANIFEST).is_file():
        stream = text if path in (None, config.data_path) else _open(str(path), config, tokenizer)
        return StreamDatabase(stream, config.retro_chunk_length)
    manifest = read_database(folder)
    _require_chunk_length(folder, manifest.job.chunk_length, config)
    streams = [_open(prefix, config, tokenizer) for prefix in manifest.prefixes]
    sources = [stream.source for stream in streams]
    return open_chunks(folder, manifest, sources, verify_checksums=config.verify_checksums)


def items_of_split(
    config: RetroDataConfig, request: SplitRequest, text: TokenStream, database: Database
) -> range | None:
    """The samples of the split: cut between samples; or, if the database has the text, those that are within the
    split's documents, so that no chunk of the database is of a sample for validation. None for a split without data.

    Raises ConfigError for data.split that is not the database's.
    """
    length, number = request.sequence_length, None
    if isinstance(database, ChunkDatabase):
        number = database.number_of(text.source.fingerprint())
    if not isinstance(database, ChunkDatabase) or number is None:
        shares = parse_split(config.split or DEFAULT_SPLIT)
        return None if shares.is_zero(request.split) else shares.range_of(request.split, items_of(text, length))
    shares = parse_split(database.manifest.job.split)
    if config.split is not None and parse_split(config.split).bounds != shares.bounds:
        raise ConfigError(
            f'data.split="{config.split}" is not the split of the database {database.name}, "{shares.text}", whose '
            "training documents are searched; leave out data.split, or build another database"
        )
    if shares.is_zero(request.split):
        return None
    documents = shares.range_of(request.split, len(text.ends))
    # Tokens of the stream at which the documents of the split begin and end.
    begin, end = (int(text.ends[place - 1]) if place else 0 for place in (documents.start, documents.stop))
    # Items that lie wholly within: item i takes tokens i S to i S + S, the last of which is a label.
    return range(-(-begin // length), (end - 1) // length)


class NeighborsFile(NamedTuple):
    """fingerprint: of the neighbours and the database. stored: the record of the file. None without a manifest."""

    path: Path
    fingerprint: str | None = None
    stored: BlockedFile | None = None


def neighbors_file(config: RetroDataConfig, length: int, text: TokenStream, database: Database) -> NeighborsFile:
    """data.retro_neighbors_path, or the array in its folder. length: of samples.

    Raises DataError for a folder with neighbours of another text, from another database, of chunks of another length,
    or for samples of another length.
    """
    folder = Path(str(config.retro_neighbors_path))
    if not folder.joinpath(MANIFEST).is_file():
        return NeighborsFile(folder)
    manifest = read_neighbors(folder)
    job, digest = manifest.job, text.source.fingerprint()
    _require_chunk_length(folder, job.chunk_length, config)
    if job.text.fingerprint != digest:
        raise DataError(
            f"{folder} has the neighbours of another text: of {manifest.prefix} with the content "
            f"{job.text.fingerprint[:16]}..., and {text.name} has {digest[:16]}...; run mt retro query for this text"
        )
    if not isinstance(database, ChunkDatabase):
        raise DataError(
            f"{folder} has neighbours in a folder of mt retro db build, and data.retro_database_path="
            f"{config.retro_database_path} is none; name that folder, or the project with data.retro_project_dir"
        )
    if job.database != database.manifest.fingerprint:
        raise DataError(
            f"{folder} has neighbours in another database: {job.database[:16]}..., and {database.name} is "
            f"{database.manifest.fingerprint[:16]}...; run mt retro query with this database"
        )
    # Neighbours were searched outside of the documents of each window of that length; a sample is within one window
    # only if its length divides it.
    if job.exclude_sequence_length is not None and job.exclude_sequence_length % length:
        raise DataError(
            f"{folder} has neighbours for samples of {job.exclude_sequence_length} tokens, none of a document of the "
            f"sample, and data.seq_length={length} does not divide them; run mt retro query with --seq-length {length}"
        )
    assert manifest.neighbors is not None
    fingerprint = combined([manifest.neighbors.sha256, job.database])
    return NeighborsFile(folder / NEIGHBORS, fingerprint, manifest.neighbors)


def open_neighbors(file: NeighborsFile, chunks: int, neighbors: int, verify_checksums: bool) -> Rows:
    """[chunks, neighbors] of the file, mapped into memory. Raises DataError for a file of another shape or type.

    verify_checksums: compare each block with its record at its first use, where there is one.
    """
    path = file.path
    try:
        # The header is read here; the pages of the array when a sample needs them.
        numbers = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise DataError(f"data.retro_neighbors_path={path} is no readable .npy file: {error.strerror}") from error
    except (ValueError, EOFError) as error:
        raise DataError(
            f"data.retro_neighbors_path={path} is no readable .npy file: it is damaged or in another format; name the "
            "neighbors.npy, or its folder, that mt retro query writes"
        ) from error
    if numbers.dtype not in (np.int32, np.int64) or numbers.ndim != 2:
        raise DataError(
            f"data.retro_neighbors_path={path} holds {numbers.dtype} {list(numbers.shape)}; it must be int32 or int64 "
            "[chunks of data.data_path, neighbours]"
        )
    if len(numbers) != chunks:
        raise DataError(
            f"data.retro_neighbors_path={path} has {len(numbers)} rows, and data.data_path has {chunks} whole chunks "
            "of data.retro_chunk_length tokens; make the neighbours of this text, with this length of chunks"
        )
    if numbers.shape[1] < neighbors:
        raise DataError(
            f"data.retro_neighbors_path={path} has {numbers.shape[1]} neighbours of each chunk, fewer than "
            f"data.retro_num_neighbors={neighbors}"
        )
    if verify_checksums and file.stored is not None:
        cure = "copy it, or remove the folder and run mt retro query again"
        return CheckedRows(numbers, neighbors, file.stored, path.with_name(MANIFEST), cure)
    first: NDArray[np.integer] = numbers[:, :neighbors]
    return first


def _require_chunk_length(folder: Path, length: int, config: RetroDataConfig) -> None:
    if length != config.retro_chunk_length:
        raise DataError(
            f"{folder} has chunks of {length} tokens, and data.retro_chunk_length={config.retro_chunk_length}; set "
            f"model.retro_chunk_length and data.retro_chunk_length to {length}"
        )


def _open(prefix: str, config: RetroDataConfig, tokenizer: Tokenizer) -> TokenStream:
    # It reads keys that this configuration has too: mmap_bin_files and accept_tokenizer_mismatch.
    return TokenStream(open_tokens(prefix, config, tokenizer), prefix)  # type: ignore[arg-type]
