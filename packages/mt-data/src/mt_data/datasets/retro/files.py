"""Token files with a chunk database and an array of neighbours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.specs import SplitRequest, Tokenizer
from mt_data.datasets.opening import open_tokens
from mt_data.datasets.retro.config import RetroDataConfig
from mt_data.datasets.retro.dataset import Retrieval, RetroDataset, items_of, retro_dataset
from mt_data.datasets.retro.stream import TokenStream
from mt_data.datasets.samples import SampleRules
from mt_data.datasets.splits import parse_split


def build_retro_files(config: RetroDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> RetroDataset | None:
    """Samples of RETRO_SAMPLE; None for a split without data.

    Raises ConfigError for files that are not named and DataError for files that do not fit one another.
    """
    for key in ("data_path", "retro_neighbors_path"):
        if getattr(config, key) is None:
            raise ConfigError(f'data.dataset_type="retro" needs data.{key}; docs/models/retro.md has the format')
    shares = parse_split(config.split)
    if shares.is_zero(request.split):
        return None
    text = _open(str(config.data_path), config, tokenizer)
    same = config.retro_database_path in (None, config.data_path)
    database = text if same else _open(str(config.retro_database_path), config, tokenizer)
    numbers = open_neighbors(
        Path(str(config.retro_neighbors_path)), len(text) // config.retro_chunk_length, config.retro_num_neighbors
    )
    rules = SampleRules.of(config, tokenizer)
    retrieval = Retrieval(numbers, database, config.retro_chunk_length, config.retrieved_length, rules.vocab_size)
    items = shares.range_of(request.split, items_of(text, request.sequence_length))
    return retro_dataset(text, items, config, request, rules, retrieval)


def open_neighbors(path: Path, chunks: int, neighbors: int) -> NDArray[np.integer]:
    """[chunks, neighbors] of the file, mapped into memory. Raises DataError for a file of another shape or type."""
    try:
        numbers = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"data.retro_neighbors_path={path} is no readable .npy file: {error}") from error
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
    return numbers[:, :neighbors]


def _open(prefix: str, config: RetroDataConfig, tokenizer: Tokenizer) -> TokenStream:
    # It reads keys that this configuration has too: mmap_bin_files and accept_tokenizer_mismatch.
    return TokenStream(open_tokens(prefix, config, tokenizer), prefix)  # type: ignore[arg-type]
