"""What cannot be read or written is an error that names it; `on_error="skip"` counts and lists lines."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_core.errors import ConfigError, DataError, PluginError
from mt_core.interfaces import SpecialTokens
from mt_data.preprocess.encoder import DocumentEncoder
from mt_data.preprocess.options import PreprocessOptions
from mt_data.preprocess.readers import MalformedRecord
from mt_data.preprocess.run import preprocess

Options = Callable[..., PreprocessOptions]

BAD_LINES = [
    (b"[1, 2]", "is a list; each line must be a JSON object"),
    (b'"text"', "is a string"),
    (b"17", "is a number"),
    (b'{"text": "cut', "is no JSON"),
    (b'{"text": "a\0b"}', "has a NUL byte, which JSON does not allow: .*--on-error skip.*--encoding utf-16-le"),
    (bytes(100), "has a NUL byte"),
    (b'{"text": "\xff"}', "is no UTF-8"),
    (b'{"title": "x", "url": "y"}', 'has no key "text" (its keys: title, url); --json-keys'),
    (b'{"text": null}', '"text" is null, not text'),
    (b'{"text": ["a", 1]}', "a list with other things than text"),
    (b'{"text": "\\ud800"}', "surrogate"),
    (b'{"text": "' + b"x" * 5000 + b'"}', "is longer than 4000 bytes; allow more with --max-line-bytes"),
]


def with_bad_lines(path: Path, every: int = 4) -> tuple[list[str], list[int]]:
    """Writes good lines with the bad ones between; the good texts and the numbers of the bad lines."""
    lines, texts, numbers = [], [], []
    for bad, _ in BAD_LINES:
        for _ in range(every):
            texts.append(f"good text {len(texts)} é")
            lines.append(json.dumps({"text": texts[-1]}).encode())
        lines.append(bad)
        numbers.append(len(lines))
    data = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return texts, numbers


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_bad_line_is_named_by_file_and_number(
    tmp_path: Path, options: Options, line: bytes, reason: str, name: str
) -> None:
    data = b'{"text": "fine"}\n\n' * 100 + line + b'\n{"text": "fine"}\n'
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(MalformedRecord) as error:
        preprocess(options(tmp_path / name, shard_mb=0.0004, max_line_bytes=4000))
    assert str(error.value).startswith(f"{tmp_path / name}, line 201: ")
    assert reason in str(error.value) or re.search(reason, str(error.value))
    assert not (tmp_path / "out" / "set_text_document.bin").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), [("a.jsonl", 1), ("a.jsonl", 2), ("a.jsonl.gz", 1)])
def test_skip_counts_and_lists(prep: Any, tmp_path: Path, options: Options, name: str, workers: int) -> None:
    texts, numbers = with_bad_lines(tmp_path / name)
    report = preprocess(
        options(tmp_path / name, on_error="skip", workers=workers, shard_mb=0.0004, max_line_bytes=4000)
    )
    assert prep.files_of(report) == prep.expected_files(texts)
    assert report.counts.skipped == len(numbers)
    assert report.skipped_report == tmp_path / "out" / "set.skipped.jsonl"
    listed = [json.loads(line) for line in report.skipped_report.read_text().splitlines()]
    assert [entry["line"] for entry in listed] == numbers
    for entry, (_, reason) in zip(listed, BAD_LINES, strict=True):
        assert entry["file"] == str(tmp_path / name)
        assert reason in entry["reason"] or re.search(reason, entry["reason"])


def test_the_character_nul_of_json_is_text(prep: Any, tmp_path: Path, options: Options) -> None:
    """Written as JSON writes it, it is kept, as Megatron keeps it."""
    (tmp_path / "a.jsonl").write_text('{"text": "a\\u0000b"}\n')
    assert prep.files_of(preprocess(options(tmp_path / "a.jsonl"))) == prep.expected_files(["a\0b"])


def test_a_line_bad_in_one_key_is_left_out_of_all(prep: Any, tmp_path: Path, options: Options) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a", "title": "b"}\n{"text": "c", "title": 4}\n{"text": "d", "title": "e"}\n')
    report = preprocess(options(source, json_keys=("text", "title"), on_error="skip"))
    assert prep.files_of(report, "text") == prep.expected_files(["a", "d"])
    assert prep.files_of(report, "title") == prep.expected_files(["b", "e"])


def test_a_row_of_parquet_is_named(tmp_path: Path, options: Options) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": ["a"] * 10 + [None]}), tmp_path / "a.parquet", row_group_size=4)
    with pytest.raises(MalformedRecord, match=r'a\.parquet, row 11: "text" is null'):
        preprocess(options(tmp_path / "a.parquet", shard_mb=1e-6))
    with pytest.raises(DataError, match='a.parquet has no column "body"; its columns are text'):
        preprocess(options(tmp_path / "a.parquet", json_keys=("body",)))
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"b\.parquet cannot be read as Parquet"):
        preprocess(options(tmp_path / "b.parquet"))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shard_mb", [0.0005, None])
def test_gzip_cut_short(prep: Any, tmp_path: Path, options: Options, workers: int, shard_mb: float) -> None:
    whole = gzip.compress(prep.write_jsonl(tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz was cut short"):
        preprocess(options(tmp_path / "cut.jsonl.gz", workers=workers, shard_mb=shard_mb, on_error="skip"))


def test_damaged_and_empty_compressed_files(prep: Any, tmp_path: Path, options: Options) -> None:
    zstd = pytest.importorskip("backports.zstd")
    data = prep.write_jsonl(tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "cut.jsonl.zst").write_bytes(zstd.compress(data)[:-10])
    (tmp_path / "other.jsonl.zst").write_bytes(data)
    (tmp_path / "other.jsonl.gz").write_bytes(data)
    (tmp_path / "none.jsonl.gz").write_bytes(b"")
    for name, words in [
        ("cut.jsonl.zst", "cut short"),
        ("other.jsonl.zst", "damaged Zstandard"),
        ("other.jsonl.gz", "damaged gzip"),
        ("none.jsonl.gz", "cut short: it is empty"),
    ]:
        with pytest.raises(DataError, match=f"{name} (was|is) {words}"):
            preprocess(options(tmp_path / name))


def test_inputs_that_are_not_there(tmp_path: Path, options: Options) -> None:
    with pytest.raises(DataError, match="matches no file"):
        preprocess(options(tmp_path / "*.jsonl"))
    with pytest.raises(DataError, match="has no text: no file is in it"):
        preprocess(options(tmp_path))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match=r"the ending says no format .*--input-format"):
        preprocess(options(tmp_path / "a.csv"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="hold no document"):
        preprocess(options(tmp_path / "empty.jsonl"))


def test_outputs_that_exist_are_kept(prep: Any, corpus: Path, options: Options) -> None:
    report = preprocess(options(corpus))
    with pytest.raises(DataError, match=r"set_text_document\.bin exists; .*--overwrite"):
        preprocess(options(corpus, append_eod=False))
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)
    partial = Path(f"{options(corpus).output_prefix}.partial")
    assert not partial.exists()
    partial.mkdir()
    (partial / "notes.txt").write_text("of the user")
    with pytest.raises(DataError, match="exists"):
        preprocess(options(corpus, append_eod=False))
    assert [path.name for path in partial.iterdir()] == ["notes.txt"]
    preprocess(options(corpus, append_eod=False, overwrite=True))
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS, append_eod=False)


def test_options_that_cannot_be(corpus: Path, options: Options) -> None:
    for changes, words in [
        ({"json_keys": ("text", "text")}, "repeats a key"),
        ({"workers": 0}, "--workers 0"),
        ({"keep_newlines": True}, "--split-sentences"),
        ({"split_sentences": True, "lang": "englsh"}, 'did you mean "english"'),
        ({"executor": "dask"}, "--dask-scheduler"),
        ({"tokenizer": {"vocab_fle": "x"}}, "unknown key tokenizer.vocab_fle"),
        ({"output_prefix": "/"}, "names a folder"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs vocab_file and merge_file; give --tokenizer vocab_file="),
    ]:
        with pytest.raises(ConfigError, match=words):
            preprocess(options(corpus, **changes))
    with pytest.raises(PluginError, match='did you mean "ByteLevelTokenizer"'):
        preprocess(options(corpus, tokenizer_type="ByteLevelTokeniser"))


def test_a_tokenizer_without_eod() -> None:
    tokenizer: Any = SimpleNamespace(vocab_size=9, special=SpecialTokens(), encode=len)
    with pytest.raises(ConfigError, match="no end-of-document id"):
        DocumentEncoder(tokenizer, ("text",), append_eod=True, split=None)


@pytest.mark.parametrize("limit", [500, 2500])
def test_disk_full(prep: Any, corpus: Path, options: Options, limit: int) -> None:
    """In a forked child, since the limit (smaller than a shard's file, or than the joined one) stays."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            preprocess(options(corpus, shard_mb=0.0005))
        except DataError as error:
            os._exit(17 if "cannot be written" in str(error) and "set" in str(error) else 18)
        finally:
            os._exit(19)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert not Path(f"{options(corpus).output_prefix}_text_document.bin").exists()
    report = preprocess(options(corpus, shard_mb=0.0005))
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)


def test_an_input_that_grows_while_it_is_read(corpus: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    from mt_data.preprocess.executors import InlineExecutor

    original = InlineExecutor.run

    def run_and_append(self: Any, task: Any, shards: Any) -> Any:
        yield from original(self, task, shards)
        with corpus.open("a") as file:
            file.write('{"text": "late"}\n')

    monkeypatch.setattr(InlineExecutor, "run", run_and_append)
    with pytest.raises(DataError, match="changed while it was read"):
        preprocess(options(corpus))
