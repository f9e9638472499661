"""What a writer refuses, and what stays usable after it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_core.errors import DataError
from mt_data.indexed import IndexedDataset, IndexedDatasetWriter

REFUSED = [
    ("uint16", [1, 65536], "id 65536 at position 1 does not fit uint16"),
    ("uint16", [-1], "id -1 at position 0 does not fit uint16"),
    ("uint8", np.array([3, 256], np.int32), "id 256 at position 1 does not fit uint8"),
    ("int8", np.array([200], np.uint8), "id 200 at position 0 does not fit int8"),
    ("int32", [2**31], "id 2147483648 at position 0 does not fit int32"),
    ("int64", np.array([2**63], np.uint64), "does not fit int64"),
    ("int64", [2**64], "cannot be stored as int64"),
    ("int32", [1.0], "ids of dtype float64 cannot be stored as int32"),
    ("int32", ["a"], "cannot be stored as int32"),
    ("int32", [True], "ids of dtype bool cannot be stored as int32"),
    ("int32", [[1], [2, 3]], "must be a flat list of numbers"),
    ("int32", [[1, 2]], r"must have one dimension, got shape \(1, 2\)"),
    ("float32", [2**24 + 1], "id 16777217 at position 0 does not fit float32"),
    ("float32", [0.1], "id 0.1 at position 0 does not fit float32"),
    ("float32", [1e300], "does not fit float32"),
    ("float64", [-(2**53) - 1], "does not fit float64"),
]


@pytest.mark.parametrize(("dtype", "ids", "message"), REFUSED)
def test_ids_that_would_change_are_refused(tmp_path: Path, dtype: str, ids: Any, message: str) -> None:
    with IndexedDatasetWriter(tmp_path / "data", dtype) as writer:
        for add in (writer.add_sequence, lambda ids: writer.add_document(ids, [len(ids)])):
            with pytest.raises(DataError, match=message):
                add(ids)
        writer.add_document([1, 2], [2])
        writer.finish()
    assert [ids.tolist() for ids in IndexedDataset(tmp_path / "data")] == [[1, 2]]


@pytest.mark.parametrize(
    ("dtype", "ids"),
    [
        ("uint16", [0, 65535]),
        ("int8", np.array([-128, 127], np.int64)),
        ("uint8", np.arange(8, dtype=np.int64)[::2]),
        ("float32", [0.5, 2**24]),
        ("float64", np.array([np.nan, np.inf, 0.1], np.float32)),
        ("float32", np.array([np.nan, -np.inf])),
    ],
)
def test_ids_at_the_limits_are_kept(tmp_path: Path, dtype: str, ids: Any) -> None:
    with IndexedDatasetWriter(tmp_path / "data", dtype) as writer:
        writer.add_document(ids, [len(ids)])
        writer.finish()
    np.testing.assert_array_equal(IndexedDataset(tmp_path / "data")[0], np.asarray(ids))


def test_a_sequence_longer_than_the_format_allows_is_refused(tmp_path: Path) -> None:
    longer = np.broadcast_to(np.uint8(0), 2**31)
    message = "a sequence of 2147483648 tokens; the format allows at most 2147483647"
    with IndexedDatasetWriter(tmp_path / "data", np.uint8) as writer, pytest.raises(DataError, match=message):
        writer.add_sequence(longer)


@pytest.mark.parametrize("lengths", [[2], [2, 2], [4, -1], [3.0]])
def test_lengths_must_add_up(tmp_path: Path, lengths: Any) -> None:
    with IndexedDatasetWriter(tmp_path / "data", np.uint8) as writer, pytest.raises(DataError):
        writer.add_document([1, 2, 3], lengths)


def test_modes_are_checked(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "plain", np.uint8) as writer:
        with pytest.raises(DataError, match="multimodal=True"):
            writer.add_sequence([1], mode=1)
        with pytest.raises(DataError, match="multimodal=True"):
            writer.add_document([1], [1], [1])
    with IndexedDatasetWriter(tmp_path / "modes", np.uint8, multimodal=True) as writer:
        with pytest.raises(DataError, match="1 modes for 2 sequences"):
            writer.add_document([1, 2], [1, 1], [1])
        with pytest.raises(DataError, match=r"id 128 .* does not fit int8"):
            writer.add_sequence([1], mode=128)


def test_an_open_document_cannot_be_finished(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", np.uint8) as writer:
        writer.add_sequence([1])
        with pytest.raises(DataError, match="last 1 sequences are in no document; call end_document"):
            writer.finish()
        writer.end_document()
        writer.finish()
    assert len(IndexedDataset(tmp_path / "data")) == 1


def test_a_finished_writer_takes_nothing_more(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "data", np.uint8)
    writer.finish()
    for use in (lambda: writer.add_sequence([1]), writer.end_document, writer.finish):
        with pytest.raises(DataError, match="was finished or aborted"):
            use()
    writer.abort()
    assert len(IndexedDataset(tmp_path / "data")) == 0


@pytest.mark.parametrize("dtype", ["uint32", "uint64", "float16", "bool"])
def test_dtypes_without_a_code_are_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(DataError, match=f"cannot hold dtype {dtype}; it can be one of uint8"):
        IndexedDatasetWriter(tmp_path / "data", dtype)
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_says_what_was_written(write: Any) -> None:
    tokenizer = {"tokenizer_type": "Null", "config": {"path": None}, "fingerprint": "ab", "vocab_size": 11}
    prefix = write(tokenizer=tokenizer, extra={"append_eod": True})
    manifest = IndexedDataset(prefix).manifest()
    assert manifest is not None
    assert (manifest.sequences, manifest.documents, manifest.tokens, manifest.dtype) == (5, 3, 10, "uint16")
    assert (manifest.bin.size, manifest.idx.size) == (20, 126)
    assert (manifest.tokenizer, manifest.vocab_size, manifest.extra) == (tokenizer, 11, {"append_eod": True})


def test_a_manifest_of_other_files_is_an_error(write: Any) -> None:
    one, other = write("one"), write("other", documents=[[[1]]])
    Path(one + ".manifest.json").write_bytes(Path(other + ".manifest.json").read_bytes())
    with pytest.raises(
        DataError, match=r"one\.manifest\.json describes other files: .* of 2 and 62 bytes, .* 20 and 126"
    ):
        IndexedDataset(one).manifest()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format_version": 1', '"format_version": 2', "format_version: Input should be 1"),
        ('"sequences": 5', '"sequences": "5"', "sequences: Input should be a valid integer"),
        ('"dtype"', '"d_type"', "dtype: Field required"),
        ("{", "", "Invalid JSON"),
    ],
)
def test_a_manifest_that_cannot_be_is_an_error(write: Any, old: str, new: str, message: str) -> None:
    path = Path(write() + ".manifest.json")
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        IndexedDataset(str(path).removesuffix(".manifest.json")).manifest()


def test_what_json_cannot_hold_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", np.uint8) as writer:
        with pytest.raises(DataError, match="manifest's extra must consist of JSON values"):
            writer.finish(extra={"path": tmp_path})
        writer.finish(extra={"path": str(tmp_path)})


def test_fingerprints_depend_on_contents_and_not_on_names(write: Any) -> None:
    one, same, other = (
        write("one"),
        write("same"),
        write("other", documents=[[[1, 2, 3], [5]], [], [[5, 6], [], [7] * 4]]),
    )
    prints = [IndexedDataset(prefix).fingerprint() for prefix in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    for prefix in (one, same):
        Path(prefix + ".manifest.json").unlink()
    longer = write("longer", documents=[[[1]]])
    Path(longer + ".manifest.json").unlink()
    bare = [IndexedDataset(prefix, mmap=mmap).fingerprint() for prefix in (one, same) for mmap in (True, False)]
    assert len(set(bare)) == 1
    assert IndexedDataset(longer).fingerprint() not in bare
