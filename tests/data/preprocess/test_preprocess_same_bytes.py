"""The output is a function of the input: not of workers, shards, formats or machines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mt_data.indexed import IndexedDatasetWriter
from mt_data.preprocess.options import PreprocessOptions
from mt_data.preprocess.parts import PartReader, ReadOptions, Shard
from mt_data.preprocess.plan import CutStream, cut_stream, examine, plan_jobs
from mt_data.preprocess.readers import MalformedRecord
from mt_data.preprocess.run import preprocess

Options = Callable[..., PreprocessOptions]
TINY = 0.0005  # MiB: about half a KiB of input in a shard


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers(prep: Any, corpus: Path, options: Options, workers: int) -> None:
    report = preprocess(options(corpus, workers=workers, shard_mb=TINY))
    assert report.shards > 5
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)
    assert not list(Path(report.outputs["text"]).parent.glob("*.partial"))


def test_without_eod_and_the_counts(prep: Any, corpus: Path, options: Options) -> None:
    report = preprocess(options(corpus, append_eod=False))
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS, append_eod=False)
    assert report.counts.documents == len(prep.TEXTS)
    assert report.counts.sequences == {"text": sum(map(bool, prep.TEXTS))}
    assert report.counts.tokens == {"text": sum(len(text.encode()) for text in prep.TEXTS)}
    assert report.counts.input_bytes == corpus.stat().st_size


LINES = st.lists(
    st.tuples(st.text(max_size=30), st.sampled_from(["\n", "\r\n", "\n\n", "\n \n"])), min_size=1, max_size=12
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, shard_bytes=st.integers(1, 200), last_line_ends=st.booleans(), compressed=st.booleans())
def test_any_cut_reads_every_line_once_with_its_number(
    tmp_path: Path, lines: list[tuple[str, str]], shard_bytes: int, last_line_ends: bool, compressed: bool
) -> None:
    data = b"".join(json.dumps({"text": text}).encode() + end.encode() for text, end in lines)
    data = data if last_line_ends else data.rstrip(b"\r\n ")
    source = tmp_path / ("lines.jsonl.gz" if compressed else "lines.jsonl")
    source.write_bytes(gzip.compress(data) if compressed else data)
    numbered = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    found: list[tuple[int, str]] = []
    for shard in shards_of(source, shard_bytes):
        for part in shard.parts:
            rejected: list[MalformedRecord] = []
            reader = PartReader(part, READ, rejected.append)
            for record in reader:
                reader.reject(record.line, "to learn its number")
                found.append((rejected[-1].line, record.value["text"]))
    assert found == [(number, json.loads(line)["text"]) for number, line in numbered]


READ = ReadOptions("auto", ("text",), 1000)


def shards_of(source: Path, shard_bytes: int) -> list[Shard]:
    shards: list[Shard] = []
    for job in plan_jobs(examine([source]), shard_bytes):
        shards += cut_stream(job, shard_bytes, READ) if isinstance(job, CutStream) else [job]
    return shards


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shard_bytes=st.integers(300, 3000))
def test_any_size_of_shards_gives_the_same_output(prep: Any, corpus: Path, options: Options, shard_bytes: int) -> None:
    report = preprocess(options(corpus, shard_mb=shard_bytes / 2**20, overwrite=True))
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)


def write_as(prep: Any, texts: list[str], path: Path) -> Path:
    plain = prep.write_jsonl(path.with_name("plain.jsonl"), texts)
    if path.name.endswith(".gz"):
        # Two members, as concatenated files have.
        data = plain.read_bytes()
        path.write_bytes(gzip.compress(data[:100]) + gzip.compress(data[100:]))
    elif path.name.endswith(".zst"):
        zstd = pytest.importorskip("backports.zstd")
        path.write_bytes(zstd.compress(plain.read_bytes()))
    elif path.name.endswith(".parquet"):
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pa.table({"other": list(range(len(texts))), "text": texts})
        pq.write_table(table, path, row_group_size=7)
    else:
        path.write_bytes(plain.read_bytes())
    plain.unlink()
    return path


@pytest.mark.parametrize("shard_mb", [TINY, None])
@pytest.mark.parametrize("ending", ["jsonl.gz", "json.zst", "parquet"])
def test_any_format(prep: Any, tmp_path: Path, options: Options, ending: str, shard_mb: float | None) -> None:
    source = write_as(prep, prep.TEXTS, tmp_path / f"corpus.{ending}")
    report = preprocess(options(source, shard_mb=shard_mb))
    assert report.shards > 2 if shard_mb else report.shards == 1
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)


@pytest.mark.slow
def test_several_files_of_several_formats_keep_their_order(prep: Any, tmp_path: Path, options: Options) -> None:
    parts = [prep.TEXTS[:20], prep.TEXTS[20:30], prep.TEXTS[30:45], prep.TEXTS[45:], ["plain text\n\nof a file"]]
    names = ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.jsonl.zst", "e.txt"]
    for name, texts in zip(names[:-1], parts, strict=False):
        write_as(prep, texts, tmp_path / name)
    (tmp_path / "e.txt").write_text(parts[-1][0])
    expected = prep.expected_files([text for part in parts for text in part])
    for workers, shard_mb in ((1, TINY), (2, TINY), (1, None)):
        report = preprocess(options(tmp_path / "?.*", workers=workers, shard_mb=shard_mb, overwrite=True))
        assert prep.files_of(report) == expected


def test_plain_text_by_the_line(prep: Any, tmp_path: Path, options: Options) -> None:
    source = tmp_path / "notes"
    source.write_bytes("one\r\n\nthree é\nfour".encode())
    report = preprocess(options(source, input_format="text-lines", shard_mb=1e-6))
    assert prep.files_of(report) == prep.expected_files(["one", "", "three é", "four"])


def test_several_keys_each_have_a_whole_output(prep: Any, tmp_path: Path, options: Options) -> None:
    source = tmp_path / "keys.jsonl"
    rows = [{"title": f"t{n}" if n % 3 else "", "text": f"body {n}", "n": n} for n in range(40)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = preprocess(options(source, json_keys=("text", "title"), shard_mb=TINY))
    for key in ("text", "title"):
        assert report.outputs[key].name == f"set_{key}_document"
        assert prep.files_of(report, key) == prep.expected_files([row[key] for row in rows])


def test_lists_of_sentences_are_sequences_of_one_document(prep: Any, tmp_path: Path, options: Options) -> None:
    source = tmp_path / "lists.jsonl"
    source.write_text('{"text": ["ab", "", "c"]}\n{"text": []}\n{"text": [""]}\n{"text": ["d"]}\n')
    report = preprocess(options(source))
    data, index = prep.files_of(report)
    # Sequences "ab", "c"+eod, "d"+eod; the second and third documents have none.
    assert data == b"".join(value.to_bytes(2, "little") for value in [97, 98, 99, 256, 100, 256])
    assert index[34:46] == b"".join(length.to_bytes(4, "little") for length in (2, 2, 2))
    assert index[-40:] == b"".join(boundary.to_bytes(8, "little") for boundary in (0, 2, 2, 2, 3))


def test_split_sentences(prep: Any, tmp_path: Path, options: Options) -> None:
    source = tmp_path / "prose.jsonl"
    source.write_text(json.dumps({"text": " Dr. No came. He left!\nSo what? "}) + "\n")
    report = preprocess(options(source, split_sentences=True))
    assert report.outputs["text"].name == "set_text_sentence"
    data, index = prep.files_of(report)
    assert bytes(data[::2][:-1]) == b"Dr. No came.He left!So what?"
    assert [int.from_bytes(index[34 + 4 * i : 38 + 4 * i], "little") for i in range(3)] == [12, 8, 9]
    kept = preprocess(options(source, split_sentences=True, keep_newlines=True, overwrite=True))
    assert bytes(prep.files_of(kept)[0][::2][:-1]) == b" Dr. No came. He left!\nSo what? "


@pytest.mark.parametrize("machines", [2, 9])
def test_parts_of_many_machines_join_to_the_whole(prep: Any, tmp_path: Path, options: Options, machines: int) -> None:
    prep.write_jsonl(tmp_path / "a.jsonl", prep.TEXTS[:40])
    write_as(prep, prep.TEXTS[40:], tmp_path / "b.jsonl.gz")
    prefixes = []
    for index in range(machines):
        report = preprocess(options(tmp_path / "?.jsonl*", shard=f"{index}/{machines}", shard_mb=4 * TINY))
        prefixes.append(report.outputs["text"])
    assert prefixes == sorted(prefixes)
    with IndexedDatasetWriter(tmp_path / "whole", "uint16") as writer:
        for prefix in prefixes:
            writer.append(prefix)
        writer.finish()
    whole = (tmp_path / "whole.bin").read_bytes(), (tmp_path / "whole.idx").read_bytes()
    assert whole == prep.expected_files(prep.TEXTS)


def test_manifest_records_tokenizer_and_origin(corpus: Path, options: Options) -> None:
    report = preprocess(options(corpus, tokenizer={"vocab_extra_ids": 3}))
    manifest = json.loads(Path(f"{report.outputs['text']}.manifest.json").read_text())
    tokenizer = manifest["tokenizer"]
    assert tokenizer["tokenizer_type"] == "ByteLevelTokenizer"
    assert tokenizer["config"] == {"vocab_extra_ids": 3}
    assert tokenizer["vocab_size"] == 264
    assert len(tokenizer["fingerprint"]) == 64
    assert manifest["extra"]["append_eod"] is True
    assert manifest["extra"]["eod"] == 256
    assert manifest["extra"]["inputs"] == [{"path": str(corpus), "size": corpus.stat().st_size}]
