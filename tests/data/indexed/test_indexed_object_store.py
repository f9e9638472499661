"""Data sets in object stores, read through fsspec."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mt_core.errors import DataError
from mt_data.indexed import IndexedDataset, IndexedDatasetWriter, verify
from mt_data.indexed.dataset import check_files

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def bucket(write: Any) -> Any:
    """fsspec's in-memory store with the files of one data set under `bucket/data`."""
    store = fsspec.filesystem("memory")
    prefix = write(tokenizer={"vocab_size": 11})
    for suffix in (".bin", ".idx", ".manifest.json"):
        store.pipe_file(f"/bucket/data{suffix}", Path(prefix + suffix).read_bytes())
    yield store
    store.rm("/bucket", recursive=True)


def test_an_object_reads_like_a_file(bucket: Any, write: Any) -> None:
    local, remote = IndexedDataset(write()), IndexedDataset("memory://bucket/data")
    assert [ids.tolist() for ids in remote] == [ids.tolist() for ids in local]
    assert remote.get(4, 1, 2).tolist() == [8, 9]
    assert remote.sequence_lengths.tolist() == local.sequence_lengths.tolist()
    assert remote.document_indices.tolist() == local.document_indices.tolist()
    assert remote.fingerprint() == local.fingerprint()
    assert check_files("memory://bucket/data").num_tokens == 10
    report = verify("memory://bucket/data")
    assert (report.ok, report.vocab_size, report.max_id) == (True, 11, 10)


def test_the_index_is_fetched_once_and_tokens_by_range(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int | None, int | None]] = []
    fetch = type(bucket).cat_file

    def counting(self: Any, path: str, start: int | None = None, end: int | None = None, **rest: Any) -> bytes:
        asked.append((path, start, end))
        return fetch(self, path, start=start, end=end, **rest)

    monkeypatch.setattr(type(bucket), "cat_file", counting)
    data = IndexedDataset("memory://bucket/data")
    assert data[2].tolist() == [5, 6]
    assert data.get(4, 2).tolist() == [9, 10]
    assert data[3].tolist() == []
    assert asked == [("/bucket/data.idx", None, None), ("/bucket/data.bin", 8, 12), ("/bucket/data.bin", 16, 20)]


def test_merging_reads_objects(bucket: Any, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "merged", "uint16") as writer:
        writer.append("memory://bucket/data")
        writer.finish()
    assert (tmp_path / "merged.bin").read_bytes() == bucket.cat_file("/bucket/data.bin")


def test_missing_and_shrunk_objects_are_named(bucket: Any) -> None:
    with pytest.raises(DataError, match=r"memory://bucket/other\.idx does not exist"):
        IndexedDataset("memory://bucket/other")
    data = IndexedDataset("memory://bucket/data")
    bucket.pipe_file("/bucket/data.bin", bytes(17))
    with pytest.raises(DataError, match=r"memory://bucket/data\.bin shrank after it was opened, from 20 to 17"):
        data[4]
    with pytest.raises(DataError, match=r"data\.bin is cut short: 17 bytes"):
        IndexedDataset("memory://bucket/data")


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(DataError, match="nosuch://bucket/data.idx: .*nosuch.*give a protocol of fsspec"):
        IndexedDataset("nosuch://bucket/data")


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(DataError, match=r"pip install mt-data\[object-store\]"):
        IndexedDataset("s3://bucket/data")


def test_files_need_no_fsspec(write: Any) -> None:
    code = (
        "import sys; from mt_data.indexed import IndexedDataset, verify; p = sys.argv[1]; "
        "assert IndexedDataset(p).manifest() and verify(p).ok; "
        "sys.exit(any(name in sys.modules for name in ('fsspec', 'rich', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code, write()], check=False).returncode == 0
