"""`mt data inspect`, `verify` and `merge`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from mt_core.errors import ConfigError, DataError
from mt_data.commands.token_files import MergeCommand, inspect, merge, verify
from mt_data.indexed import IndexedDataset
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

TEXTS = ["Hello world", "", "tab\tbell\x07 [bold]done[/bold]"]


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(inspect)
    app.command()(verify)
    app.command(cls=MergeCommand)(merge)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def text(write: Any) -> str:
    """Prefix of three documents, made with the byte-level tokenizer and recorded as preprocessing does."""
    tokenizer = ByteLevelTokenizer()
    return write(
        "text",
        documents=[[tokenizer.encode(text)] if text else [] for text in TEXTS],
        tokenizer={
            "tokenizer_type": "ByteLevelTokenizer",
            "config": {"tokenizer_type": "ByteLevelTokenizer", "vocab_extra_ids": 0},
            "fingerprint": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size,
        },
        extra={"append_eod": False},
    )


def test_inspect_shows_counts_lengths_and_text(text: str) -> None:
    shown = run("inspect", text).stdout
    for words in (
        "3 (1 empty)",
        "ByteLevelTokenizer",
        "vocabulary  261",
        "append_eod  False",
        "8 to 15",
        "Hello world",
    ):
        assert words in shown
    assert "tab\tbell\\x07 [bold]done[/bold]" in shown.replace(" " * 5, "\t")
    assert "\x07" not in shown


def test_inspect_as_json_agrees_with_the_data(text: str) -> None:
    found = json.loads(run("inspect", text, "--json", "--max-tokens", "5").stdout)
    assert (found["documents"], found["sequences"], found["tokens"], found["empty_documents"]) == (3, 2, 38, 1)
    assert [preview["text"] for preview in found["first_documents"]] == ["Hello", "", "tab\tb"]
    assert found["lengths"]["percentiles"]["50"] == 11
    assert found["manifest"]["extra"] == {"append_eod": False}
    assert found["notes"] == []


def test_inspect_decodes_with_a_tokenizer_that_is_named(write: Any) -> None:
    prefix = write(documents=[[list(b"bare")]])
    without = json.loads(run("inspect", prefix, "--json").stdout)
    assert without["first_documents"][0] == {
        "number": 0,
        "sequences": 1,
        "tokens": 4,
        "ids": [98, 97, 114, 101],
        "text": None,
    }
    assert "name one with --tokenizer-type" in without["notes"][0]
    named = run(
        "inspect", prefix, "--json", "--tokenizer-type", "ByteLevelTokenizer", "--tokenizer", "vocab_extra_ids=2"
    )
    assert json.loads(named.stdout)["first_documents"][0]["text"] == "bare"


def test_inspect_never_decodes_with_another_tokenizer(write: Any, text: str) -> None:
    with pytest.raises(DataError, match="was made with ByteLevelTokenizer of fingerprint .*, and this tokenizer has"):
        run("inspect", text, "--tokenizer", "vocab_extra_ids=3")
    recorded = {"tokenizer_type": "ByteLevelTokenizer", "config": {}, "fingerprint": "of files that have changed"}
    shown = run("inspect", write("old", documents=[[list(b"text")]], tokenizer=recorded)).stdout
    assert "116 101 120 116" in shown
    assert "Ids are shown, since the recorded tokenizer cannot be used" in shown


def test_inspect_refuses_options_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="must read KEY=VALUE"):
        run("inspect", text, "--tokenizer", "vocab_extra_ids")
    with pytest.raises(ConfigError, match="vocab_extra_id"):
        run("inspect", text, "--tokenizer", "vocab_extra_id=3")


def test_inspect_of_nothing(write: Any) -> None:
    assert "tokens     0" in run("inspect", write(documents=[])).stdout


def test_verify_says_what_was_checked(text: str, write: Any) -> None:
    shown = run("verify", text).stdout
    assert "3 documents, 2 sequences, 38 tokens of uint16" in shown
    assert "both files match the manifest" in shown
    assert "ids: from 7 to 119, all below vocab_size=261" in shown
    bare = write("bare")
    Path(bare + ".manifest.json").unlink()
    shown = run("verify", bare).stdout
    assert "not compared, there is no manifest" in shown
    assert "not compared, give --vocab-size" in shown


def test_verify_fails_on_a_problem(text: str) -> None:
    count = sum(byte >= 100 for text in TEXTS for byte in text.encode())
    with pytest.raises(DataError, match=f"{count} ids are not below vocab_size=100"):
        run("verify", text, "--vocab-size", "100")
    with pytest.raises(DataError, match=r"\.bin does not exist"):
        run("verify", text + ".idx")


def test_merge_says_what_inputs_differ_in(write: Any, tmp_path: Path) -> None:
    inputs = [write(name, extra={"append_eod": name == "a", "level": "document"}) for name in ("a", "b")]
    shown = run("merge", "--input", *inputs, "--output-prefix", str(tmp_path / "merged")).stdout
    assert "tokenizer: not recorded" in shown
    assert "the inputs differ in it: append_eod\n" in shown


def test_merge_of_a_folder(write: Any, tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(f"shards/{name}", documents=[[[ord(name)]]])
    output = str(tmp_path / "merged")
    arguments = ["merge", "--input", str(tmp_path / "shards"), "--output-prefix", output]
    assert "2 documents, 2 sequences, 2 tokens of uint16, from 2 data sets" in run(*arguments).stdout
    assert [ids.tolist() for ids in IndexedDataset(output)] == [[97], [98]]
    with pytest.raises(DataError, match="merged.idx exists; choose another --output-prefix, or pass --overwrite"):
        run(*arguments)
    shards = [str(tmp_path / "shards" / name) for name in ("b", "a", "b")]
    run("merge", "--input", *shards, "--output-prefix", output, "--overwrite")
    assert [ids.tolist() for ids in IndexedDataset(output)] == [[98], [97], [98]]
