"""Configuration of data sets whose samples carry neighbours."""

from __future__ import annotations

from pydantic import PositiveInt, model_validator

from mt_core.config.schema import DataConfig
from mt_core.errors import ConfigError
from mt_data.datasets.builtin import BuiltinDataConfig


class NeighborKeys(DataConfig):
    """The shape of neighbours; the model has the same keys."""

    retro_chunk_length: PositiveInt = 64
    """Tokens of a chunk. It divides seq_length."""
    retro_num_neighbors: PositiveInt = 2
    """Neighbours of a chunk."""
    retro_num_retrieved_chunks: PositiveInt = 2
    """Chunks of a neighbour: the one that was found, and those that follow it."""

    @model_validator(mode="after")
    def _check_chunks(self) -> NeighborKeys:
        if self.seq_length % self.retro_chunk_length:
            raise ConfigError(
                f"data.seq_length={self.seq_length} is not a multiple of data.retro_chunk_length="
                f"{self.retro_chunk_length}; cut samples into whole chunks"
            )
        for key in ("reset_position_ids", "reset_attention_mask"):
            if getattr(self, key):
                raise ConfigError(
                    f"data.{key}=true keeps documents apart, and the neighbours of a chunk belong to all documents in "
                    "it; set it to false"
                )
        return self

    @property
    def retrieved_length(self) -> int:
        """Tokens of a neighbour."""
        return self.retro_chunk_length * self.retro_num_retrieved_chunks


class BuiltinRetroDataConfig(NeighborKeys, BuiltinDataConfig):
    """The text that every Python carries; neighbours are chunks of other documents of its training split."""

    dataset_type: str = "builtin_retro"
    corpus_bytes: PositiveInt = 1_000_000
    """About how much text to take, in bytes, over all splits."""


class RetroDataConfig(NeighborKeys):
    """Token files with the neighbours of their chunks."""

    dataset_type: str = "retro"
    data_path: str | None = None
    """Prefix of the `.bin` and `.idx` files of the text. Default: that of retro_project_dir, if it has one text."""
    split: str | None = None
    """Shares of train, validation and test. Default: those of a database folder that has the text, whose documents they
    divide; else 969, 30, 1, cut between samples."""
    retro_project_dir: str | None = None
    """A project of `mt retro build`, in place of the next two keys."""
    retro_neighbors_path: str | None = None
    """A folder of `mt retro query`; or a `.npy` file of int32 or int64 [chunks of data_path, at least
    retro_num_neighbors]: row j has the numbers of chunks of the database that are nearest to tokens
    j retro_chunk_length ... of the text, the nearest first; -1 where there are fewer."""
    retro_database_path: str | None = None
    """A folder of `mt retro db build`; or the prefix of `.bin` and `.idx` files, whose chunk n begins at token n
    retro_chunk_length. Default: data_path."""
    mmap_bin_files: bool = True
    """Map the arrays of `.idx` into memory, which the processes of a machine then share; false reads them."""
    verify_checksums: bool = True
    """Compare each block of `.bin`, and of the database's and the neighbours' `.npy`, at its first use, and each `.idx`
    as it is opened, with the checksums in its manifest."""
    accept_tokenizer_mismatch: bool = False
    """Go on with token files whose manifest names another tokenizer than the configured one."""
