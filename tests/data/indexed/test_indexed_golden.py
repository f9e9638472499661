"""Files that Megatron wrote: read, written again, and compared byte for byte."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_data.indexed import IndexedDataset, IndexedDatasetWriter, verify
from mt_data.indexed.merging import merge

SYNTHETIC = [
    "dtype_uint8",
    "dtype_int32",
    "dtype_int64",
    "dtype_uint16",
    "adddoc_int32",
    "multimodal_uint8",
    "blend_third",
    "wordpiece_sentence",
]
PREPROCESSED = ["corpus_text_document", "corpus_title_document", "edge_text_document", "edge_noeod_text_document"]


def info(golden: Path, folder: str, name: str) -> dict[str, Any]:
    return json.loads((golden / folder / "info.json").read_text())[name]


def open_golden(golden: Path, folder: str, name: str) -> IndexedDataset:
    return IndexedDataset(golden / folder / name, multimodal=name.startswith("multimodal"))


def digests(prefix: Path) -> dict[str, str]:
    return {kind: sha256(prefix.with_suffix(f".{kind}").read_bytes()).hexdigest() for kind in ("bin", "idx")}


def write_by_sequence(source: IndexedDataset, prefix: Path) -> None:
    modes = source.sequence_modes
    bounds = source.document_indices.tolist()
    with IndexedDatasetWriter(prefix, source.dtype, multimodal=modes is not None) as writer:
        for begin, end in pairwise(bounds):
            for number in range(begin, end):
                writer.add_sequence(source[number].tolist(), 0 if modes is None else int(modes[number]))
            writer.end_document()
        writer.finish()


def write_by_document(source: IndexedDataset, prefix: Path) -> None:
    modes = source.sequence_modes
    bounds = source.document_indices.tolist()
    with IndexedDatasetWriter(prefix, source.dtype, multimodal=modes is not None) as writer:
        for begin, end in pairwise(bounds):
            ids = np.concatenate([np.zeros(0, source.dtype), *(source[number] for number in range(begin, end))])
            kinds = None if modes is None else modes[begin:end].tolist()
            writer.add_document(ids, source.sequence_lengths[begin:end].tolist(), kinds)
        writer.finish()


@pytest.mark.parametrize("way", [write_by_sequence, write_by_document])
@pytest.mark.parametrize(
    ("folder", "name"), [("synthetic", n) for n in SYNTHETIC] + [("prep", n) for n in PREPROCESSED]
)
def test_written_again_the_bytes_are_the_same(golden: Path, tmp_path: Path, folder: str, name: str, way: Any) -> None:
    way(open_golden(golden, folder, name), tmp_path / name)
    assert digests(tmp_path / name) == info(golden, folder, name)["sha256"]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", SYNTHETIC)
def test_reads_what_megatron_says_is_in_its_files(golden: Path, name: str, mmap: bool) -> None:
    expected = info(golden, "synthetic", name)
    data = IndexedDataset(golden / "synthetic" / name, mmap=mmap, multimodal=name.startswith("multimodal"))
    assert (len(data), data.num_documents, data.dtype.name) == tuple(
        expected[key] for key in ("sequences", "documents", "dtype")
    )
    assert data[0].tolist() == expected["first_sequence"]
    assert data[-1].tolist() == expected["last_sequence"]
    if "sequence_lengths" in expected:
        assert data.sequence_lengths.tolist() == expected["sequence_lengths"]
        assert data.document_indices.tolist() == expected["document_indices"]
    modes = None if data.sequence_modes is None else data.sequence_modes.tolist()
    assert modes == expected.get("sequence_modes")
    assert data.manifest() is None
    assert verify(data.prefix).ok


def test_every_sequence_of_the_edge_cases_is_read(golden: Path) -> None:
    expected = info(golden, "prep", "edge_text_document")
    data = open_golden(golden, "prep", "edge_text_document")
    assert [ids.tolist() for ids in data] == expected["sequences_ids"]
    assert data.document_indices.tolist() == expected["document_indices"]


def test_a_merge_has_the_bytes_of_megatrons(golden: Path, tmp_path: Path) -> None:
    expected = info(golden, "synthetic", "merged_uint16")
    merge([str(golden / "synthetic" / name) for name in expected["merge_of"]], str(tmp_path / "merged"))
    assert digests(tmp_path / "merged") == expected["sha256"]
