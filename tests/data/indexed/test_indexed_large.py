"""Past 2^31 tokens and 4 GiB, with sparse files; thousands of shards; memory that does not grow with the data."""

from __future__ import annotations

import multiprocessing
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_data.indexed import IndexedDataset, IndexedDatasetWriter, verify
from mt_data.indexed.dataset import Scan

pytestmark = pytest.mark.slow

LONGEST = 2**31 - 1


def write_index(prefix: Path, dtype: np.dtype, code: int, lengths: np.ndarray) -> None:
    """`.idx` of one document for each sequence, and a `.bin` of zeros that takes no room."""
    count = len(lengths)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, count, count + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((ends - lengths * np.int64(dtype.itemsize)).astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(int(ends[-1]))


@pytest.mark.parametrize("mmap", [True, False])
def test_tokens_past_4_gib_are_read(tmp_path: Path, mmap: bool) -> None:
    dtype = np.dtype(np.uint16)
    write_index(tmp_path / "data", dtype, 8, np.array([LONGEST, LONGEST, 7], np.int64))
    with (tmp_path / "data.bin").open("r+b") as file:
        for position, value in ((LONGEST, 11), (2 * LONGEST - 1, 12), (2 * LONGEST + 6, 13)):
            file.seek(2 * position)
            file.write(struct.pack("<H", value))
    data = IndexedDataset(tmp_path / "data", mmap=mmap)
    assert data.num_tokens == 2 * LONGEST + 7 > 2**32
    assert (tmp_path / "data.bin").stat().st_size == 2 * (2 * LONGEST + 7) > 2**33
    assert data.get(1, 0, 2).tolist() == [11, 0]
    assert data.get(1, LONGEST - 2).tolist() == [0, 12]
    assert data[2].tolist() == [0] * 6 + [13]
    assert data.sequence_lengths.sum(dtype=np.int64) == data.num_tokens


def test_offsets_of_a_merge_do_not_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.array([LONGEST, 5, LONGEST], np.int64)
    for name in ("a", "b"):
        write_index(tmp_path / name, np.dtype(np.int32), 4, lengths)

    def no_tokens(scan: Scan) -> Iterator[np.ndarray]:
        yield from ()

    monkeypatch.setattr(Scan, "tokens", no_tokens)  # 34 GB are not written here; the index alone is of interest
    with IndexedDatasetWriter(tmp_path / "merged", np.int32) as writer:
        for name in ("a", "b"):
            writer.append(tmp_path / name)
        writer.finish()
    index = (tmp_path / "merged.idx").read_bytes()
    both = np.concatenate([lengths, lengths])
    assert np.frombuffer(index, "<i4", 6, 34).tolist() == both.tolist()
    offsets = [sum(both.tolist()[:i]) * 4 for i in range(6)]
    assert offsets[-1] > 2**34
    assert np.frombuffer(index, "<i8", 6, 34 + 24).tolist() == offsets
    assert np.frombuffer(index, "<i8", 7, 34 + 72).tolist() == list(range(7))


def test_a_mapped_shard_keeps_no_descriptor(write: Any) -> None:
    prefix = write()

    def map_many() -> None:
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 64, before + 64))
        shards = [IndexedDataset(prefix, mmap=mmap) for mmap in (True, False) for _ in range(200)]
        right = all(shard[4].tolist() == [7, 8, 9, 10] for shard in shards)
        os._exit(7 if right and len(os.listdir("/proc/self/fd")) < before + 64 else 8)

    child = multiprocessing.get_context("fork").Process(target=map_many)
    child.start()
    child.join()
    assert child.exitcode == 7


def test_maps_are_given_back(write: Any) -> None:
    prefix = write()

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(prefix)

    view = IndexedDataset(prefix)[0]
    assert maps() == 1  # .bin, by the view; the index went with its data set
    assert view.tolist() == [1, 2, 3]
    del view
    assert maps() == 0


BOUNDED = """
import resource, sys
import numpy as np
from mt_data.indexed import IndexedDatasetWriter, verify

source, target, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]) << 20
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + limit, size + limit))
try:
    np.ones(2 * limit, np.uint8)
except MemoryError:
    print("limited")
with IndexedDatasetWriter(target, np.int64) as writer:
    for _ in range(2):
        writer.append(source)
    manifest = writer.finish()
assert verify(target, 10).problems == []
print(manifest.sequences)
"""


def test_appending_and_verifying_take_bounded_memory(tmp_path: Path) -> None:
    count = 4_000_000
    write_index(tmp_path / "source", np.dtype(np.int64), 5, np.ones(count, np.int64))
    sizes = [(tmp_path / f"source.{kind}").stat().st_size for kind in ("bin", "idx")]
    assert min(sizes) * 2 > 60 << 20  # what is made of it has two such files, and neither fits
    arguments = [sys.executable, "-c", BOUNDED, str(tmp_path / "source"), str(tmp_path / "target"), "96"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["limited", str(2 * count)], "")
    assert verify(tmp_path / "target").ok


def test_a_writer_does_not_grow_with_the_number_of_sequences(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", np.uint8) as writer:
        lengths = np.zeros(1 << 20, np.int32)
        for _ in range(4):
            writer.add_document([], lengths)
        # 16 MiB of lengths are no longer in memory but in a nameless file.
        assert writer._lengths._file._rolled  # type: ignore[attr-defined]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin.tmp"]
        writer.finish()
    assert len(IndexedDataset(tmp_path / "data")) == 4 << 20
