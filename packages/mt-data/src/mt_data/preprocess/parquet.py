"""Parquet files as rows, streamed; pyarrow is imported only here, when such a file is met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_core.errors import DataError
from mt_data.preprocess.formats import open_bytes

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

# Rows of a corpus can be documents of some MB, so a batch of pyarrow's default size (65536 rows) may not fit in memory.
BATCH_ROWS = 128
BUFFER_BYTES = 2**20


@contextmanager
def open_parquet(path: Path) -> Iterator[ParquetFile]:
    """An open file, read through a buffer instead of a row group at once. DataError names file and cause."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise DataError(f"{path} needs pyarrow (pip install pyarrow, or mt-data[parquet])") from error
    try:
        # pre_buffer would read the column chunks of a row group into memory before the first row.
        with open_bytes(path) as raw, pq.ParquetFile(raw, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def iter_rows(
    file: ParquetFile,
    path: Path,
    columns: Iterable[str] | None = None,
    row_groups: Sequence[int] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row counted from 1 over the whole file, its columns). `row_groups` picks some of the file's."""
    names = check_columns(file, path, columns)
    groups = range(file.num_row_groups) if row_groups is None else row_groups
    for group in groups:
        row = 1 + first_row(file, group)
        # use_threads=False: the parallelism is one process a core already.
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=names, use_threads=False):
            for value in batch.to_pylist():
                yield row, value
                row += 1


def first_row(file: ParquetFile, group: int) -> int:
    return sum(file.metadata.row_group(before).num_rows for before in range(group))


def check_columns(file: ParquetFile, path: Path, columns: Iterable[str] | None) -> list[str] | None:
    """The columns as a list; DataError when the file lacks one."""
    if columns is None:
        return None
    names = list(columns)
    for name in names:
        if name not in file.schema_arrow.names:
            raise DataError(
                f'{path} has no column "{name}"; its columns are {", ".join(file.schema_arrow.names)} '
                "(--json-keys names what to read)"
            )
    return names
