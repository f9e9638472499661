"""Damaged, foreign and mismatched files: the error says which file, what is wrong with it, and what was expected."""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.indexed.test_indexed_atomic import exit_code, forked, in_child
from tests.small_process import in_small_process

from mt_core.errors import DataError
from mt_data.indexed import IndexedDataset, IndexedDatasetWriter, verify
from mt_data.indexed.dataset import check_files

Damage = Callable[[Path, Path], object]


def patch(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def cut(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)


def extend(path: Path, count: int) -> None:
    with path.open("ab") as file:
        file.write(bytes(count))


def set_last_pointer(idx: Path, value: int) -> None:
    patch(idx, 34 + 4 * 5 + 8 * 4, struct.pack("<q", value))


# The data set has 5 sequences (3, 1, 2, 0 and 4 tokens of 2 bytes) and 3 documents: .idx has 34 + 60 + 32 bytes.
CASES: dict[str, tuple[Damage, str]] = {
    "no .idx": (lambda idx, bin: idx.unlink(), r"data\.idx does not exist; give the prefix"),
    "no .bin": (lambda idx, bin: bin.unlink(), r"data\.bin does not exist"),
    "empty .idx": (lambda idx, bin: idx.write_bytes(b""), r"data\.idx is empty \(0 bytes\)"),
    "foreign .idx": (
        lambda idx, bin: idx.write_bytes(b"TNTIDX\0\0" * 9),
        r"begins with b'TNTIDX.* instead of b'MMIDIDX",
    ),
    "text as .idx": (lambda idx, bin: idx.write_text("{}"), r"is not the index of an indexed dataset"),
    "magic alone": (
        lambda idx, bin: idx.write_bytes(b"MMIDIDX\0\0"),
        r"cut short: 9 bytes, and the header alone has 34",
    ),
    "version 2": (lambda idx, bin: patch(idx, 9, b"\x02"), r"format version 2; only version 1"),
    "dtype code 0": (
        lambda idx, bin: patch(idx, 17, b"\x00"),
        r"dtype code 0; known are uint8 \(code 1\).*float64 \(code 6\)",
    ),
    "dtype code 9": (lambda idx, bin: patch(idx, 17, b"\x09"), r"unknown dtype code 9"),
    "another dtype": (lambda idx, bin: patch(idx, 17, b"\x05"), r"data\.bin is cut short: 20 bytes, and .* says 44"),
    "no boundaries": (lambda idx, bin: patch(idx, 26, bytes(8)), r"empty document index"),
    "truncated .idx": (lambda idx, bin: cut(idx, 3), r"cut short: .* take 126 bytes; the file has 123"),
    "long .idx": (lambda idx, bin: extend(idx, 3), r"too long: .* take 126 bytes; the file has 129"),
    "huge count": (
        lambda idx, bin: patch(idx, 18, b"\xff" * 8),
        r"cut short: the header says 18446744073709551615 seq",
    ),
    "first document": (lambda idx, bin: patch(idx, 94, b"\x01"), r"first document begins at sequence 1, it must be 0"),
    "last document": (lambda idx, bin: patch(idx, 118, b"\x04"), r"last document ends at sequence 4, but there are 5"),
    "truncated .bin": (lambda idx, bin: cut(bin, 1), r"data\.bin is cut short: 19 bytes, and .*data\.idx says 20"),
    "empty .bin": (lambda idx, bin: bin.write_bytes(b""), r"data\.bin is cut short: 0 bytes"),
    "long .bin": (lambda idx, bin: extend(bin, 2), r"data\.bin is too long: 22 bytes, and .*data\.idx says 20"),
    "overflow": (lambda idx, bin: set_last_pointer(idx, -12), r"offset -12 and length 4; negative .* 32-bit overflow"),
}


@pytest.mark.parametrize("case", CASES)
def test_opening_names_what_is_wrong(write: Any, case: str) -> None:
    damage, message = CASES[case]
    prefix = write()
    damage(Path(prefix + ".idx"), Path(prefix + ".bin"))
    for read in (IndexedDataset, check_files):
        with pytest.raises(DataError, match=message):
            read(prefix)
    assert not verify(prefix).ok


# What sizes do not show is found when the arrays are used, and by verify.
DEEP: dict[str, tuple[Damage, Callable[[IndexedDataset], object], str]] = {
    "lengths": (
        lambda idx, bin: patch(idx, 34, b"\x04"),
        lambda d: d.sequence_lengths,
        r"add up to 11 tokens, and .* 10",
    ),
    "negative": (
        lambda idx, bin: patch(idx, 34, struct.pack("<2i", -1, 5)),
        lambda d: d.sequence_lengths,
        r"shortest -1",
    ),
    "pointer": (
        lambda idx, bin: patch(idx, 62, b"\xff\xff"),
        lambda d: d[1],
        r"sequence 1 has offset 65535 and length 1",
    ),
    "lengths of the same sum": (
        lambda idx, bin: patch(idx, 34, struct.pack("<3i", 1, 3, 2)),
        lambda d: d.sequence_lengths,
        r"data\.idx is damaged: sequence 1 begins at byte 6 of .*data\.bin, which is not where",
    ),
    "a length": (
        lambda idx, bin: patch(idx, 34, struct.pack("<3i", 1, 3, 2)),
        lambda d: d[0],
        r"data\.idx is damaged: sequence 1 begins at byte 6",
    ),
    "a length of nothing": (
        lambda idx, bin: patch(idx, 42, struct.pack("<2i", 1, 1)),
        lambda d: d.read(3),
        r"sequence 4 begins at byte 12",
    ),
    "offsets": (
        lambda idx, bin: patch(idx, 62, struct.pack("<q", 4)),
        lambda d: d.sequence_lengths,
        r"sequence 1 begins at byte 4",
    ),
    "documents": (lambda idx, bin: patch(idx, 102, b"\x05"), lambda d: d.document_indices, r"begins before the one"),
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("case", DEEP)
def test_damage_inside_is_found_when_it_is_used(write: Any, case: str, mmap: bool) -> None:
    damage, use, message = DEEP[case]
    prefix = write()
    damage(Path(prefix + ".idx"), Path(prefix + ".bin"))
    data = IndexedDataset(prefix, mmap=mmap)
    with pytest.raises(DataError, match=message):
        use(data)
    assert not verify(prefix).ok


def test_modes_are_neither_guessed_nor_dropped(tmp_path: Path, write: Any) -> None:
    with IndexedDatasetWriter(tmp_path / "modes", np.uint8, multimodal=True) as writer:
        writer.add_sequence([1], mode=1)
        writer.end_document()
        writer.finish()
    with pytest.raises(DataError, match=r"holds a mode for each .* multimodal=True \(--multimodal\)"):
        IndexedDataset(tmp_path / "modes")
    with pytest.raises(DataError, match=r"holds no modes .* multimodal=False"):
        IndexedDataset(write(), multimodal=True)


@pytest.mark.parametrize("documents", [[], [[], []], [[[]]]])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_data_set_without_tokens_is_one(write: Any, documents: list[Any], mmap: bool) -> None:
    prefix = write(documents=documents)
    data = IndexedDataset(prefix, mmap=mmap)
    assert len(data) == sum(map(len, documents))
    assert data.num_documents == len(documents)
    assert [ids.tolist() for ids in data] == [[] for _ in range(len(data))]
    assert verify(prefix).ok


def test_a_file_that_shrinks_while_read_plainly_is_an_error(write: Any) -> None:
    prefix = write()
    data = IndexedDataset(prefix, mmap=False)
    assert data[0].tolist() == [1, 2, 3]
    os.truncate(prefix + ".bin", 14)
    with pytest.raises(DataError, match=r"data\.bin shrank after it was opened, from 20 to 14 bytes"):
        data[4]
    assert data[0].tolist() == [1, 2, 3]


PAGE = 4096
USES: dict[str, Callable[[IndexedDataset], object]] = {
    "a view": lambda data: data[2 * PAGE].tolist(),
    "a copy": lambda data: data.read(2 * PAGE).tolist(),
    "lengths": lambda data: int(data.sequence_lengths.sum()),
    "documents": lambda data: int(data.document_indices.sum()),
    "offsets": lambda data: int(data.byte_offsets.sum()),
}


def use_after_shrinking(prefix: str, suffix: str, use: str) -> None:
    """Exit code 7: the data set was of use, then its file lost what is asked for, and that was a DataError."""
    data = IndexedDataset(prefix)
    USES[use](data)
    os.truncate(prefix + suffix, PAGE)
    try:
        USES[use](data)
    except DataError as error:
        os._exit(7 if f"data{suffix} shrank after it was opened" in str(error) else 8)


# In processes of their own: what is to be shown is that the system does not end them (SIGBUS).
def test_a_mapped_file_that_shrinks_is_an_error(write: Any) -> None:
    in_small_process(shrink_before_each_use, write(documents=[[[1]]] * (3 * PAGE)))


def shrink_before_each_use(prefix: str) -> None:
    for suffix, use in [(".bin", "a view"), (".bin", "a copy"), *((".idx", use) for use in USES)]:
        whole = Path(prefix + suffix).read_bytes()
        assert in_child(use_after_shrinking, prefix, suffix, use) == 7, (suffix, use)
        Path(prefix + suffix).write_bytes(whole)


def read_until_it_shrinks(prefix: str, write_end: int) -> None:
    data = IndexedDataset(prefix)
    os.write(write_end, b"ready")
    try:
        while True:
            for number in range(0, len(data), 97):
                assert data.read(number).tolist() == [1]
    except DataError as error:
        os._exit(7 if "shrank after it was opened" in str(error) else 8)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_shrinks_in_the_middle_of_reading_is_an_error(write: Any, suffix: str) -> None:
    in_small_process(shrink_while_it_is_read, write(documents=[[[1]]] * (3 * PAGE)), suffix)


def shrink_while_it_is_read(prefix: str, suffix: str) -> None:
    whole = Path(prefix + suffix).read_bytes()
    for attempt in range(20):
        Path(prefix + suffix).write_bytes(whole)
        read_end, write_end = os.pipe()
        child = forked(read_until_it_shrinks, prefix, write_end)
        os.close(write_end)  # only the child holds it then, and its death ends the wait
        assert os.read(read_end, 5) == b"ready"
        os.close(read_end)
        time.sleep(attempt * 0.0005)
        os.truncate(prefix + suffix, PAGE)
        assert exit_code(child) == 7


def test_a_file_that_was_removed_is_read_to_its_end(write: Any) -> None:
    prefix = write()
    data = IndexedDataset(prefix)
    assert data[0].tolist() == data.read(0).tolist() == [1, 2, 3]
    for suffix in (".bin", ".idx"):
        os.unlink(prefix + suffix)
    assert data[4].tolist() == data.read(4).tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_changes_before_its_first_use_is_an_error(write: Any, mmap: bool) -> None:
    prefix = write()
    data = IndexedDataset(prefix, mmap=mmap)
    os.truncate(prefix + ".idx", 60)
    with pytest.raises(DataError, match=r"data\.idx shrank after it was opened, from 126 to 60 bytes"):
        data.sequence_lengths  # noqa: B018


def test_a_system_without_room_for_maps_names_the_way_around(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(path: str) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mt_data.indexed.storage.map_file", no_room)
    with pytest.raises(DataError, match=r"no more maps .* mmap=False"):
        IndexedDataset(write())[0]
    assert IndexedDataset(write(), mmap=False)[0].tolist() == [1, 2, 3]


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.idx").mkdir()
    with pytest.raises(DataError, match=r"data\.idx cannot be read: Is a directory"):
        IndexedDataset(tmp_path / "data")
