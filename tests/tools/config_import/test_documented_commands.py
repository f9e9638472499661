"""The commands of Megatron-LM's README, typed on small data: preprocessing, import and training of BERT, T5 and ICT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mt_cli.main import run

SIZES = (
    "--hidden-size 32 --num-attention-heads 2 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 "
    "--lr 0.0001 --train-iters 2 --lr-decay-iters 2 --lr-decay-style linear --min-lr 0.00001 --weight-decay 1e-2 "
    "--lr-warmup-fraction .01 --clip-grad 1.0 --vocab-file bert-vocab.txt --split 949,50,1 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 1"
)
BERT = f"{SIZES} --num-layers 2 --seq-length 64"
T5 = (
    f"{SIZES} --encoder-num-layers 2 --decoder-num-layers 2 --kv-channels 16 --ffn-hidden-size 64 "
    "--encoder-seq-length 64 --decoder-seq-length 32 --vocab-extra-ids 100"
)
ICT = f"{BERT} --titles-data-path my-ict_title_sentence --ict-head-size 16 --use-one-sent-docs"
SENTENCES = "The quick brown fox jumps over the lazy dog. It runs far away from here. And it sleeps well."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": SENTENCES, "title": "The fox"})] * 100
    Path("my-corpus.json").write_text("\n".join(lines) + "\n")
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *letters, *(f"##{letter}" for letter in letters)]
    Path("bert-vocab.txt").write_text("\n".join(pieces) + "\n")
    return tmp_path


def preprocess(prefix: str, tokenizer_type: str, *options: str) -> None:
    words = f"--input my-corpus.json --output-prefix {prefix} --vocab-file bert-vocab.txt --tokenizer-type "
    arguments = [*words.split(), tokenizer_type, "--split-sentences", "--workers", "1", "--input-format", "jsonl"]
    assert run(["data", "preprocess", *arguments, *options]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "words", "tokenizer_type"),
    [
        ("bert", BERT, "BertWordPieceLowerCase"),
        ("t5", f"{T5} --tokenizer-type BertWordPieceCase", "BertWordPieceCase"),
        ("ict", ICT, "BertWordPieceLowerCase"),
    ],
)
def test_what_is_preprocessed_and_imported_trains(folder: Path, entry: str, words: str, tokenizer_type: str) -> None:
    keys = ("--json-keys", "text", "title") if entry == "ict" else ()
    preprocess(f"my-{entry}", tokenizer_type, *keys)
    arguments = [*words.split(), "--data-path", f"my-{entry}_text_sentence"]
    assert run(["import", "-o", "run.json", "--entry", entry, "--megatron-args", *arguments]) == 0
    assert run(["train", "run.json", "--run-dir", "run"]) == 0
    losses = [json.loads(line).get("loss") for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len([loss for loss in losses if loss is not None]) == 2


def test_another_tokenizer_is_named_with_its_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess("my-bert", "BertWordPieceLowerCase")
    arguments = [*BERT.split(), "--data-path", "my-bert_text_sentence", "--tokenizer-type", "BertWordPieceCase"]
    assert run(["import", "-o", "run.json", "--entry", "bert", "--megatron-args", *arguments]) == 0
    assert run(["train", "run.json", "--run-dir", "run"]) != 0
    printed = capsys.readouterr().err
    assert 'tokenizer.tokenizer_type="BertWordPieceLowerCase", tokenizer.vocab_file="bert-vocab.txt"' in printed
