"""`mt data preprocess` as a user types it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mt_core.errors import ConfigError
from mt_data.commands.preprocess import PreprocessCommand, preprocess, spread, tokenizer_options

app = typer.Typer()
app.command(cls=PreprocessCommand)(preprocess)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_several_inputs_and_keys_behind_one_option(prep: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "text {name}", "title": "title {name}"}}\n')
    result = run(
        *["--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--output-prefix", tmp_path / "set"],
        *["--json-keys", "text", "title", "--tokenizer-type", "ByteLevelTokenizer", "--append-eod"],
        *["--vocab-extra-ids", 2, "--workers", 1],
    )
    assert result.exit_code == 0, result.output
    for key in ("text", "title"):
        files = tuple((tmp_path / f"set_{key}_document{ending}").read_bytes() for ending in (".bin", ".idx"))
        assert files == prep.expected_files([f"{key} a", f"{key} b"])
        assert f"set_{key}_document: 2 sequences" in result.output
    assert "joining 1 shards" in result.output


def test_skipped_lines_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbad\n')
    result = run(
        *["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "set", "--workers", 1],
        *["--tokenizer-type", "ByteLevelTokenizer", "--on-error", "skip"],
    )
    assert result.exit_code == 0, result.output
    assert f"lines skipped: 1; {tmp_path / 'set.skipped.jsonl'} lists them" in result.output


def test_the_part_of_a_machine_is_printed(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    result = run(
        *["--input", corpus, "--output-prefix", tmp_path / "set", "--workers", 1, "--shard-mb", 0.001],
        *["--tokenizer-type", "ByteLevelTokenizer"],
    )
    assert result.exit_code == 0, result.output
    assert "part 1 of 2 (SLURM_ARRAY_TASK_ID=1)" in result.output
    assert (tmp_path / "set_00001-of-00002_text_document.bin").exists()
    merge = (
        f"--input {tmp_path}/set_{{00000..00001}}-of-00002_text_document --output-prefix {tmp_path}/set_text_document"
    )
    assert merge in result.output


def test_a_part_without_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "only one"}\n')
    for part in (0, 1):
        result = run(
            *["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "set", "--shard", f"{part}/2"],
            *["--tokenizer-type", "ByteLevelTokenizer"],
        )
        assert result.exit_code == 0, result.output
    counts = [path.stat().st_size // 2 for path in sorted(tmp_path.glob("set_*.bin"))]
    assert sorted(counts) == [0, len("only one")]


def test_a_terminal_shows_rates_live() -> None:
    from rich.console import Console

    from mt_data.commands.display import RichProgress
    from mt_data.preprocess.options import Counts

    console = Console(force_terminal=True, width=100, file=io.StringIO())
    with RichProgress(console) as progress:
        progress.begin(1000)
        progress.advance(Counts(input_bytes=400, documents=3, tokens={"text": 1234567}), reused=True)
        progress.advance(Counts(input_bytes=600, documents=2, tokens={"text": 1}), reused=False)
        progress.join(2)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("tokenizing", "100%", "MB/s", "docs/s", "1.23M tokens", "5 documents, 1,234,568 tokens"):
        assert words in shown


def test_spread_and_tokenizer_options() -> None:
    assert spread(["--input", "a", "b", "--x", "y", "--json-keys=k", "-v"], ["--input"]) == [
        *["--input", "a", "--input", "b", "--x", "y", "--json-keys=k", "-v"]
    ]
    assert tokenizer_options({"vocab_file": "v", "merge_file": None}, ["lower=true", "n = 3", "name=a b"]) == {
        "vocab_file": "v",
        "lower": True,
        "n": 3,
        "name": "a b",
    }
    for setting in ("x", "=3", "vocab_file=w"):
        with pytest.raises(ConfigError, match="--tokenizer"):
            tokenizer_options({"vocab_file": "v"}, [setting])


def test_json_key_is_taken_with_a_note(tmp_path, monkeypatch, capsys) -> None:
    """Megatron's older script has --json-key."""
    from mt_cli.main import run

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"title": "one", "text": "x"}\n')
    options = ["--input", "a.jsonl", "--output-prefix", "a", "--tokenizer-type", "ByteLevelTokenizer"]
    assert run(["data", "preprocess", *options, "--json-key", "title", "text"]) == 0
    assert (tmp_path / "a_title_document.idx").exists()
    assert (tmp_path / "a_text_document.idx").exists()
    assert "note: --json-key is called --json-keys here" in capsys.readouterr().err
