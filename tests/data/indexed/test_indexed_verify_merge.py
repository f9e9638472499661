"""The full check, merging, and statistics of lengths."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mt_core.errors import DataError
from mt_data.indexed import IndexedDataset, IndexedDatasetWriter, verify
from mt_data.indexed.inspection import length_statistics
from mt_data.indexed.merging import find_prefixes, merge


def patch(path: str, offset: int, data: bytes) -> None:
    content = bytearray(Path(path).read_bytes())
    content[offset : offset + len(data)] = data
    Path(path).write_bytes(content)


# -- verify -----------------------------------------------------------------------------------


def test_verify_reports_range_and_vocabulary(write: Any) -> None:
    report = verify(write(tokenizer={"vocab_size": 11}))
    assert (report.problems, report.vocab_size, report.min_id, report.max_id) == ([], 11, 1, 10)
    assert verify(report.prefix, 10).num_out_of_range == 1


def test_verify_locates_the_first_id_out_of_range(write: Any) -> None:
    (problem,) = verify(write(), 9).problems
    assert "data.bin: 2 ids are not below vocab_size=9 (they go from 1 to 10)" in problem
    assert "the first is 9 at token 2 of sequence 4 (document 2)" in problem


def test_verify_finds_negative_ids(write: Any) -> None:
    (problem,) = verify(write(documents=[[[1]], [[2, -3]]], dtype="int32"), 9).problems
    assert "the first is -3 at token 1 of sequence 1 (document 1)" in problem


def test_verify_compares_text_only_with_the_vocabulary(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", "uint8", multimodal=True) as writer:
        writer.add_document([1, 200, 201, 2], [1, 2, 1], [0, 1, 0])
        writer.finish()
    assert verify(tmp_path / "data", 3).ok
    (problem,) = verify(tmp_path / "data", 2).problems
    assert "1 ids are not below vocab_size=2" in problem
    assert "the first is 2 at token 0 of sequence 2 (document 0)" in problem


def test_verify_finds_a_flipped_bit_by_the_checksum(write: Any) -> None:
    prefix = write()
    patch(prefix + ".bin", 4, b"\x02")
    (problem,) = verify(prefix).problems
    assert "data.bin is damaged: its SHA-256 is" in problem
    Path(prefix + ".manifest.json").unlink()
    assert verify(prefix).ok


INSIDE = {
    "length": (
        34,
        struct.pack("<2i", 2, 2),
        "sequence 1 has length 2 and byte offset 6; the sequences before it end at 4",
    ),
    "pointer": (62, b"\x07", "sequence 1 has length 1 and byte offset 7; the sequences before it end at 6"),
    "document": (102, b"\x05", "document boundary 2 is sequence 2, before the boundary in front of it (5)"),
}


@pytest.mark.parametrize("part", INSIDE)
@pytest.mark.parametrize("manifest", [True, False])
def test_verify_and_append_find_damage_inside_the_index(write: Any, tmp_path: Path, part: str, manifest: bool) -> None:
    offset, data, message = INSIDE[part]
    prefix = write()
    patch(prefix + ".idx", offset, data)
    if not manifest:
        Path(prefix + ".manifest.json").unlink()
    problems = verify(prefix).problems
    assert message in problems[0]
    assert len(problems) == 1 + manifest
    with IndexedDatasetWriter(tmp_path / "out" / "data", "uint16") as writer, pytest.raises(DataError) as error:
        writer.append(prefix)
    assert message in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_verify_compares_the_counts_of_the_manifest(write: Any) -> None:
    path = Path(write() + ".manifest.json")
    path.write_text(path.read_text().replace('"documents": 3', '"documents": 4'))
    (problem,) = verify(str(path).removesuffix(".manifest.json")).problems
    assert "says documents=4, the files have 3" in problem


# -- merge ------------------------------------------------------------------------------------


def test_a_merge_keeps_documents_empty_ones_included(write: Any, tmp_path: Path) -> None:
    first, empty, last = write("a"), write("b", documents=[]), write("c", documents=[[], [[1], [2]]])
    merge([first, empty, last], str(tmp_path / "merged"))
    data = IndexedDataset(tmp_path / "merged")
    assert data.document_indices.tolist() == [0, 2, 2, 5, 5, 7]
    assert [ids.tolist() for ids in data] == [[1, 2, 3], [4], [5, 6], [], [7, 8, 9, 10], [1], [2]]
    assert verify(data.prefix).ok


def test_a_merge_keeps_modes(tmp_path: Path) -> None:
    for name, mode in (("a", 1), ("b", 2)):
        with IndexedDatasetWriter(tmp_path / name, "uint8", multimodal=True) as writer:
            writer.add_document([1, 2], [1, 1], [0, mode])
            writer.finish()
    merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "merged"), multimodal=True)
    modes = IndexedDataset(tmp_path / "merged", multimodal=True).sequence_modes
    assert modes is not None
    assert modes.tolist() == [0, 1, 0, 2]


def test_a_merge_of_other_dtypes_or_tokenizers_is_refused(write: Any, tmp_path: Path) -> None:
    def made_with(name: str, fingerprint: str, **more: Any) -> str:
        return write(name, tokenizer={"tokenizer_type": "T", "fingerprint": fingerprint}, **more)

    one, other = made_with("one", "f1"), made_with("other", "f2")
    with pytest.raises(DataError, match=r"one was made with tokenizer T \(fingerprint f1\) and .*other with T .*f2"):
        merge([one, other], str(tmp_path / "merged"))
    wide = made_with("wide", "f1", dtype="int32")
    with pytest.raises(DataError, match="one holds uint16 and .*wide int32"):
        merge([one, wide], str(tmp_path / "merged"))
    with pytest.raises(DataError, match="both an input and the output"):
        merge([one], one)
    assert not list(tmp_path.glob("merged*"))


def test_a_merge_records_what_all_inputs_agree_on(write: Any, tmp_path: Path) -> None:
    tokenizer = {"tokenizer_type": "T", "fingerprint": "f", "vocab_size": 11}
    one = write("one", tokenizer=tokenizer, extra={"append_eod": True, "source": 1})
    two = write("two", tokenizer=tokenizer, extra={"append_eod": True, "source": 2})
    manifest = merge([one, two], str(tmp_path / "merged"))
    assert (manifest.tokenizer, manifest.extra) == (tokenizer, {"append_eod": True})
    assert merge([one, write("bare")], str(tmp_path / "mixed")).tokenizer is None


def test_a_folder_stands_for_its_pairs_by_name(write: Any, tmp_path: Path) -> None:
    prefixes = [write(f"shards/{name}") for name in ("b", "a.2", "a.10")]
    shards = tmp_path / "shards"
    assert find_prefixes([str(shards), "x"]) == [prefixes[2], prefixes[1], prefixes[0], "x"]
    (shards / "b.bin").unlink()
    with pytest.raises(DataError, match=r"only one half of b: b\.bin is missing"):
        find_prefixes([str(shards)])
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="holds no .bin and .idx pair"):
        find_prefixes([str(tmp_path / "none")])


# -- statistics -------------------------------------------------------------------------------

LENGTHS = hnp.arrays(np.int32, st.integers(1, 40), elements=st.integers(0, 2**31 - 1) | st.integers(0, 70000))


@given(lengths=LENGTHS, pieces=st.integers(1, 3))
def test_statistics_agree_with_numpy(lengths: np.ndarray, pieces: int) -> None:
    parts = [part for part in np.array_split(lengths, pieces) if len(part)]
    found = length_statistics(lambda: parts)
    assert (found.count, found.total) == (len(lengths), lengths.sum(dtype=np.int64))
    assert (found.shortest, found.longest, found.empty) == (lengths.min(), lengths.max(), (lengths == 0).sum())
    expected = np.percentile(lengths, list(found.percentiles), method="inverted_cdf")
    assert list(found.percentiles.values()) == expected.tolist()
    assert sum(count for _, _, count in found.histogram) == len(lengths)
    for first, last, count in found.histogram:
        assert count == ((lengths >= first) & (lengths <= last)).sum()


def test_statistics_of_nothing() -> None:
    found = length_statistics(list)
    assert (found.count, found.mean, found.percentiles, found.histogram) == (0, 0.0, {}, [])
