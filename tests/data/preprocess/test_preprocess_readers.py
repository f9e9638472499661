"""Streaming records of every format, and what cannot be read."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest

from mt_core.errors import DataError
from mt_data.preprocess.readers import MalformedRecord, expand_globs, iter_documents, iter_records


def test_globs_are_sorted_and_files_taken_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).touch()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "d.jsonl").touch()
    (tmp_path / "odd[1].jsonl").touch()
    found = expand_globs([tmp_path / "c.*", str(tmp_path / "[ab].jsonl"), tmp_path / "*.txt"])
    assert [path.name for path in found] == ["c.txt", "a.jsonl", "b.jsonl"]
    assert [path.name for path in expand_globs([tmp_path / "**" / "d.jsonl"])] == ["d.jsonl"]
    assert [path.name for path in expand_globs([tmp_path / "odd[1].jsonl"])] == ["odd[1].jsonl"]
    for patterns, words in (([tmp_path / "*.zip"], "matches no file"), ([], "no input")):
        with pytest.raises(DataError, match=words):
            expand_globs(patterns)
    assert [path.name for path in expand_globs([tmp_path])] == [
        "a.jsonl",
        "b.jsonl",
        "c.txt",
        "d.jsonl",
        "odd[1].jsonl",
    ]


def test_records_know_their_place(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": "b", "big": 123456789012345678901234567890}\n{"x": NaN}'
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.ndjson.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfline\r\nline")
    records = list(iter_documents([tmp_path / "a.jsonl", tmp_path / "b.ndjson.gz", tmp_path / "c.txt"]))
    assert [(Path(record.file).name, record.line) for record in records] == [
        *[("a.jsonl", 1), ("a.jsonl", 3), ("a.jsonl", 4)],
        *[("b.ndjson.gz", 1), ("b.ndjson.gz", 3), ("b.ndjson.gz", 4)],
        ("c.txt", 1),
    ]
    assert records[1].value["big"] == 123456789012345678901234567890
    assert records[-1].value == {"text": "line\r\nline"}


def test_malformed_lines_can_be_passed_over(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": 1}\nbad\n[]\n{"text": "' + b"y" * 3_000_000 + b'"}\n{"text": 2}\n')
    with pytest.raises(MalformedRecord, match=r"a\.jsonl, line 2: is no JSON"):
        list(iter_records(source))
    skipped: list[MalformedRecord] = []
    records = list(iter_records(source, on_malformed=skipped.append, max_line_bytes=1000))
    assert [record.line for record in records] == [1, 5]
    assert [error.line for error in skipped] == [2, 3, 4]
    again = pickle.loads(pickle.dumps(skipped[0]))
    assert (str(again), again.line) == (str(skipped[0]), 2)


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\nnot \xfe fine")
    with pytest.raises(MalformedRecord, match=r"a\.txt, line 2: is no UTF-8 \(0xfe"):
        list(iter_records(tmp_path / "a.txt"))
    with pytest.raises(MalformedRecord, match="longer than 4 bytes"):
        list(iter_records(tmp_path / "a.txt", max_line_bytes=4))


def test_parquet_rows_are_numbered_over_row_groups(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": [["a", "b"], ["c"], []], "n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    records = list(iter_records(tmp_path / "a.parquet", columns=["text"]))
    assert [(record.line, record.value) for record in records] == [
        (1, {"text": ["a", "b"]}),
        (2, {"text": ["c"]}),
        (3, {"text": []}),
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read: No such file"):
        list(iter_records(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"input format 'csv' is not known"):
        list(iter_records(tmp_path / "none.jsonl", input_format="csv"))
    with pytest.raises(DataError, match="decompress the .gz first"):
        list(iter_records(tmp_path / "a.parquet.gz"))
