"""What is written is what is read, for any dtype, lengths and documents."""

from __future__ import annotations

import pickle
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mt_core.errors import DataError
from mt_data.indexed import IndexedDataset, IndexedDatasetWriter, verify
from mt_data.indexed.layout import dtype_for_vocab
from mt_data.indexed.reader import MemoryIndexedDataset, SequenceReader

# Written out once more, from the format's description and not from the code.
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def expected_index(dtype: np.dtype, documents: list[list[np.ndarray]], modes: list[int] | None) -> bytes:
    """`.idx` by the table of the format, in plain Python."""
    lengths = [len(sequence) for document in documents for sequence in document]
    pointers = [sum(lengths[:i]) * dtype.itemsize for i in range(len(lengths))]
    bounds = [sum(map(len, documents[:i])) for i in range(len(documents) + 1)]
    s, d = len(lengths), len(bounds)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype.name], s, d)
    body = struct.pack(f"<{s}i", *lengths) + struct.pack(f"<{s}q", *pointers) + struct.pack(f"<{d}q", *bounds)
    return head + body + (struct.pack(f"<{s}b", *modes) if modes is not None else b"")


@st.composite
def data_sets(draw: st.DrawFn) -> tuple[np.dtype, list[list[np.ndarray]]]:
    dtype = np.dtype(draw(st.sampled_from(sorted(CODES))))
    sequence = hnp.arrays(dtype, st.integers(0, 9))
    return dtype, draw(st.lists(st.lists(sequence, max_size=4), max_size=5))


def write(prefix: str, dtype: np.dtype, documents: list[list[np.ndarray]], modes: list[int] | None) -> None:
    left = iter(modes or [])
    with IndexedDatasetWriter(prefix, dtype, multimodal=modes is not None) as writer:
        for number, document in enumerate(documents):
            kinds = None if modes is None else [next(left) for _ in document]
            if number % 2:
                ids = np.concatenate([np.zeros(0, dtype), *document])
                writer.add_document(ids, [len(sequence) for sequence in document], kinds)
                continue
            for i, sequence in enumerate(document):
                writer.add_sequence(sequence, kinds[i] if kinds else 0)
            writer.end_document()
        writer.finish()


def check_reading(reader: SequenceReader, documents: list[list[np.ndarray]], data: st.DataObject) -> None:
    sequences = [sequence for document in documents for sequence in document]
    assert len(reader) == len(sequences)
    assert reader.sequence_lengths.dtype == np.int32
    assert reader.sequence_lengths.tolist() == [len(sequence) for sequence in sequences]
    assert reader.document_indices.dtype == np.int64
    assert np.diff(reader.document_indices).tolist() == [len(document) for document in documents]
    for number, sequence in enumerate(sequences):
        assert reader[number].dtype == reader.dtype
        assert reader[number].tobytes() == sequence.tobytes()
    if sequences:
        number = data.draw(st.integers(-len(sequences), len(sequences) - 1))
        begin = data.draw(st.integers(0, len(sequences[number])))
        end = data.draw(st.integers(begin, len(sequences[number])))
        assert reader.get(number, begin, end - begin).tobytes() == sequences[number][begin:end].tobytes()
        assert reader.get(number, begin).tobytes() == sequences[number][begin:].tobytes()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data_set=data_sets(), multimodal=st.booleans(), mmap=st.booleans(), data=st.data())
def test_files_hold_what_was_written(
    data_set: tuple[np.dtype, list[list[np.ndarray]]], multimodal: bool, mmap: bool, data: st.DataObject
) -> None:
    dtype, documents = data_set
    count = sum(map(len, documents))
    modes = data.draw(st.lists(st.integers(-128, 127), min_size=count, max_size=count)) if multimodal else None
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data"
        write(prefix, dtype, documents, modes)
        reader = IndexedDataset(prefix, mmap=mmap, multimodal=multimodal)
        assert Path(prefix + ".idx").read_bytes() == expected_index(dtype, documents, modes)
        assert reader.dtype == dtype
        check_reading(reader, documents, data)
        assert (None if reader.sequence_modes is None else reader.sequence_modes.tolist()) == modes
        assert verify(prefix).problems == []


@settings(max_examples=20, deadline=None)
@given(data_set=data_sets(), data=st.data())
def test_memory_has_the_same_interface(data_set: tuple[np.dtype, list[list[np.ndarray]]], data: st.DataObject) -> None:
    dtype, documents = data_set
    sequences = [sequence for document in documents for sequence in document]
    bounds = np.cumsum([0, *map(len, documents)])
    tokens = np.concatenate([np.zeros(0, dtype), *sequences])
    check_reading(MemoryIndexedDataset(tokens, [len(s) for s in sequences], bounds), documents, data)
    if sequences and sum(map(len, sequences)):
        reader = MemoryIndexedDataset.from_sequences(sequences, bounds)
        check_reading(reader, documents, data)
        assert reader.fingerprint() == MemoryIndexedDataset.from_sequences(sequences, bounds).fingerprint()
        assert reader.fingerprint() != MemoryIndexedDataset.from_sequences([*sequences, [1]]).fingerprint()


def test_memory_refuses_lengths_that_do_not_add_up() -> None:
    with pytest.raises(DataError, match="add up to 3 tokens, 4 were given"):
        MemoryIndexedDataset(np.arange(4), [1, 2])
    with pytest.raises(DataError, match="must go up from 0 to 2"):
        MemoryIndexedDataset(np.arange(3), [1, 2], [0, 1])


def test_mapped_sequences_are_read_only_views_of_one_map(write: Any) -> None:
    data = IndexedDataset(write())
    first, part = data[0], data.get(0, 1, 2)
    assert np.shares_memory(first, part)
    assert first[1:].ctypes.data == part.ctypes.data
    assert not first.flags.owndata
    for array in (first, data.sequence_lengths, data.document_indices):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_a_view_outlives_its_data_set(write: Any) -> None:
    view = IndexedDataset(write())[4]
    assert view.tolist() == [7, 8, 9, 10]


def test_a_pickled_data_set_opens_again(write: Any) -> None:
    data = pickle.loads(pickle.dumps(IndexedDataset(write(), mmap=False)))
    assert data[4].tolist() == [7, 8, 9, 10]


def test_numbers_outside_are_refused(write: Any) -> None:
    data = IndexedDataset(write())
    for arguments in [(5,), (-6,), (0, 4), (0, -1), (0, 1, 3), (0, 0, -1)]:
        with pytest.raises(IndexError):
            data.get(*arguments)
    assert data.get(np.int64(0), 3).tolist() == []


@pytest.mark.parametrize(
    ("size", "name"), [(None, "int32"), (1, "uint16"), (65499, "uint16"), (65500, "int32"), (70000, "int32")]
)
def test_dtype_for_vocab(size: int | None, name: str) -> None:
    assert dtype_for_vocab(size) == np.dtype(name)
