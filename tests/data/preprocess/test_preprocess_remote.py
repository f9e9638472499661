"""Inputs in object stores, read through fsspec; outputs there are refused, not written beside."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_data.corpora.running import RunOptions
from mt_data.datasets.raw_text import RawTextOptions, is_raw_text, tokenized
from mt_data.indexed import IndexedDataset
from mt_data.preprocess.options import PreprocessOptions
from mt_data.preprocess.readers import MalformedRecord, expand_globs
from mt_data.preprocess.run import preprocess
from mt_data.tokenizers.byte_level import ByteLevelConfig, build_byte_level

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("upath")
Options = Callable[..., PreprocessOptions]


@pytest.fixture
def bucket(prep: Any, tmp_path: Path) -> Any:
    """fsspec's in-memory store; `bucket/plain.jsonl` and `bucket/packed.jsonl.gz` hold prep.TEXTS."""
    store = fsspec.filesystem("memory")
    content = prep.write_jsonl(tmp_path / "local.jsonl").read_bytes()
    store.pipe_file("/bucket/plain.jsonl", content)
    store.pipe_file("/bucket/packed.jsonl.gz", gzip.compress(content))
    yield store
    store.rm("/bucket", recursive=True)


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("name", ["plain.jsonl", "pl*.jsonl", "packed.jsonl.gz"])
def test_objects_are_read_like_files(prep: Any, options: Options, name: str) -> None:
    report = preprocess(options(f"memory://bucket/{name}", shard_mb=0.0008))
    assert report.shards > 2
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)


@pytest.mark.slow
def test_workers_open_the_objects_themselves(prep: Any, corpus: Path, options: Options) -> None:
    report = preprocess(options(f"file://{corpus}", shard_mb=0.0008, workers=2))
    assert prep.files_of(report) == prep.expected_files(prep.TEXTS)


def test_a_bad_line_of_an_object_is_named(bucket: Any, options: Options) -> None:
    bucket.pipe_file("/bucket/bad.jsonl", b'{"text": "a"}\n' * 100 + b"nothing\n")
    with pytest.raises(MalformedRecord, match=r"memory://bucket/bad\.jsonl, line 101"):
        preprocess(options("memory://bucket/bad.jsonl", shard_mb=0.0008))


def test_an_object_that_is_replaced_while_it_is_read(bucket: Any, options: Options) -> None:
    from mt_data.preprocess.run_plan import plan_run

    plan = plan_run(options("memory://bucket/plain.jsonl"))
    bucket.pipe_file("/bucket/plain.jsonl", bucket.cat_file("/bucket/plain.jsonl"))
    with pytest.raises(DataError, match="changed while it was read"):
        plan.check_inputs_unchanged()


@pytest.mark.usefixtures("bucket")
def test_what_matches_nothing_is_named() -> None:
    with pytest.raises(DataError, match=r"memory://bucket/\*\.txt' matches no file"):
        expand_globs(["memory://bucket/*.txt"])
    with pytest.raises(DataError, match="memory://bucket' matches folders alone"):
        expand_globs(["memory://bucket"])
    with pytest.raises(ConfigError, match="nosuch:// cannot be used"):
        expand_globs(["nosuch://bucket/a.jsonl"])


@pytest.mark.usefixtures("bucket")
def test_raw_text_of_a_run_may_be_an_object(prep: Any, tmp_path: Path) -> None:
    assert is_raw_text("memory://bucket/plain.jsonl")
    tokenizer: Tokenizer = build_byte_level(ByteLevelConfig())
    prefix = tokenized("memory://bucket/plain.jsonl", RawTextOptions(), tokenizer, tmp_path / "cache")
    assert len(IndexedDataset(prefix)) == sum(bool(text) for text in prep.TEXTS)


def test_outputs_in_a_store_are_refused(
    corpus: Path, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--output-prefix s3://bucket/set: outputs are written to files.*a path"):
        options(corpus, output_prefix="s3://bucket/set")
    with pytest.raises(ConfigError, match="--output s3:/bucket: outputs are written to files"):
        RunOptions(Path("s3://bucket"))
    assert not list(tmp_path.glob("s3*"))
