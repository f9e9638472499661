"""`mt data train-tokenizer`: what it writes is what the registered tokenizers read."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mt_core.errors import ConfigError, DataError
from mt_core.plugins import load_plugins
from mt_core.specs import TOKENIZERS
from mt_data.commands.train_tokenizer import train_tokenizer
from mt_data.tokenizers.training import cut_long

CASES = [
    ("bpe", "gpt2", "GPT2BPETokenizer"),
    ("bpe", "huggingface", "HuggingFaceTokenizer"),
    ("bpe", "sentencepiece", "SentencePieceTokenizer"),
    ("wordpiece", "bert", "BertWordPieceLowerCase"),
    ("unigram", "huggingface", "HuggingFaceTokenizer"),
    ("unigram", "sentencepiece", "SentencePieceTokenizer"),
]


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(train_tokenizer)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def corpus_file(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in corpus), encoding="utf-8")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form", "tokenizer_type"), CASES)
def test_what_it_writes_can_be_used(
    kind: str, form: str, tokenizer_type: str, corpus_file: str, tmp_path: Path, adversarial: list[str]
) -> None:
    out = tmp_path / "out"
    options = [
        "--kind",
        kind,
        "--format",
        form,
        "--input",
        corpus_file,
        "--vocab-size",
        "600",
        "--vocab-extra-ids",
        "3",
    ]
    printed = run(*options, "--output", str(out))
    section = tomllib.loads(printed[printed.index("[tokenizer]") : printed.index("next:")])["tokenizer"]
    assert section["tokenizer_type"] == tokenizer_type
    spec = load_plugins()[TOKENIZERS].get(tokenizer_type)
    tokenizer = spec.build.load()(spec.config_type.load()(**section))
    assert tokenizer.vocab_size == 600
    assert "600 tokens" in printed
    assert len(tokenizer.special.sentinels) == 3
    assert tokenizer.special.eod is not None
    assert len(tokenizer.encode("import argparse")) <= 8
    if form != "bert":
        plain = [text for text in adversarial if "<" not in text]
        if form == "sentencepiece":  # its models cannot hold the character that stands for a space, nor NUL
            plain = [text for text in plain if "\x00" not in text]
        for text in plain:
            assert tokenizer.decode(tokenizer.encode(text)) == text, text
    assert sorted(path.name for path in out.iterdir()) == sorted(tokenizer.files())
    assert f"--tokenizer-type {tokenizer_type}" in printed


def test_training_twice_gives_the_same_files(corpus_file: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run("--kind", "bpe", "--input", corpus_file, "--vocab-size", "500", "--output", str(tmp_path / name))
    for file in ("vocab.json", "merges.txt"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.slow
def test_refuses_what_cannot_be(corpus_file: str, tmp_path: Path) -> None:
    base = ["--input", corpus_file, "--output", str(tmp_path / "new")]
    for options, kind, message in [
        (
            ["--kind", "bpe", "--vocab-size", "257"],
            ConfigError,
            "--vocab-size 257 is too small; it must be at least 258",
        ),
        (["--kind", "wordpiece", "--vocab-size", "500", "--format", "gpt2"], ConfigError, "it can be bert"),
        (
            ["--kind", "bpe", "--vocab-size", "500", "--json-keys", "body"],
            DataError,
            "line 1: the key 'body' holds nothing",
        ),
        (["--kind", "bpe", "--vocab-size", "500", "--json-keys", "n"], DataError, "holds a int, not text"),
        (
            ["--kind", "unigram", "--format", "sentencepiece", "--vocab-size", "90000"],
            ConfigError,
            "SentencePiece cannot",
        ),
    ]:
        with pytest.raises(kind, match=message):
            run(*base, *options)
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "old.txt").write_text("x")
    with pytest.raises(ConfigError, match="is not empty; name another directory, or pass --overwrite"):
        run(*base, "--kind", "bpe", "--vocab-size", "500")


def test_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": " "}\n{"text": []}\n')
    with pytest.raises(DataError, match="no text to train on"):
        run(
            "--kind",
            "bpe",
            "--vocab-size",
            "300",
            "--input",
            str(tmp_path / "a.jsonl"),
            "--output",
            str(tmp_path / "o"),
        )


def test_max_mb_stops_reading(tmp_path: Path) -> None:
    good = json.dumps({"text": "ab " * 2000}) + "\n"
    (tmp_path / "a.jsonl").write_text(good * 2 + "broken\n")
    options = [
        "--kind",
        "bpe",
        "--vocab-size",
        "300",
        "--input",
        str(tmp_path / "a.jsonl"),
        "--output",
        str(tmp_path / "o"),
    ]
    run(*options, "--max-mb", "0.01")
    with pytest.raises(DataError, match="line 3"):
        run(*options, "--overwrite")


def test_long_texts_are_cut_at_lines() -> None:
    text = "one\ntwo\n" + "x" * 25 + "\nend"
    parts = list(cut_long(text, 10))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 10
    assert parts[0] == "one\ntwo\n"
