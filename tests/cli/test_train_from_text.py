"""From text to a trained model with commands alone: raw, preprocessed, blended; the tokenizer travels along."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from mt_cli.main import run

SETTINGS = [
    "model.family=gpt",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.position_embedding_type=rope",
    "data.dataset_type=gpt",
    "data.seq_length=32",
    'data.split="80,20,0"',
    "train.micro_batch_size=2",
    "train.train_iters=3",
    "train.eval_iters=1",
    "train.num_threads=1",
    "train.sample_tokens=4",
    "logging.log_interval=1",
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two small corpora, a vocabulary trained on them, and both preprocessed with it."""
    folder = tmp_path_factory.mktemp("text")
    texts = [text for _, text in sorted(topics.items())]
    for name, part in (("one", texts[:20]), ("two", texts[20:40])):
        lines = [json.dumps({"text": text}) for text in part]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    vocabulary = ["data", "train-tokenizer", "--kind", "bpe", "--vocab-size", "400", "--output", str(folder / "bpe")]
    assert run([*vocabulary, "--input", str(folder / "*.jsonl")]) == 0
    for name in ("one", "two"):
        command = [
            "data",
            "preprocess",
            "--input",
            str(folder / f"{name}.jsonl"),
            "--output-prefix",
            str(folder / name),
        ]
        assert run([*command, *tokenizer_options(folder), "--append-eod", "--workers", "1"]) == 0
    return folder


def tokenizer_options(folder: Path) -> list[str]:
    files = {path.name: path for path in (folder / "bpe").iterdir()}
    return [
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", str(files["vocab.json"]), "--merge-file", str(files["merges.txt"])),
    ]


def train(folder: Path, data_path: str, run_dir: Path, *more: str) -> int:
    tokenizer = [
        "tokenizer.tokenizer_type=GPT2BPETokenizer",
        f'tokenizer.vocab_file="{folder / "bpe" / "vocab.json"}"',
        f'tokenizer.merge_file="{folder / "bpe" / "merges.txt"}"',
    ]
    settings = [*SETTINGS, *tokenizer, f"data.data_path={data_path}", *more]
    return run(["train", "--run-dir", str(run_dir), *(part for text in settings for part in ("--set", text))])


@pytest.mark.slow
@pytest.mark.parametrize("source", ["a preprocessed prefix", "a blend", "raw text"])
def test_training_takes(work, tmp_path, source, capsys) -> None:
    first, second = f'"{work}/one_text_document"', f'"{work}/two_text_document"'
    data_path = {
        "a preprocessed prefix": f"[{first}]",
        "a blend": f"[{{prefix={first}, weight=3.0}}, {{prefix={second}, weight=1.0}}]",
        "raw text": f'["{work}/one.jsonl"]',
    }[source]
    assert train(work, data_path, tmp_path / "run") == 0
    assert "step 3/3" in capsys.readouterr().out


def test_raw_text_is_trained_on_as_its_preprocessed_form(work, tmp_path) -> None:
    def losses(data_path: str, name: str) -> list[float]:
        assert train(work, data_path, tmp_path / name) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines if '"train"' in line]

    assert losses(f'["{work}/one.jsonl"]', "raw") == losses(f'["{work}/one_text_document"]', "prepared")


def test_the_tokenizer_is_saved_with_the_checkpoint(work, tmp_path, capsys) -> None:
    copy = tmp_path / "work"
    shutil.copytree(work, copy)
    assert train(copy, f'["{copy}/one_text_document"]', tmp_path / "run") == 0
    shutil.rmtree(copy)
    capsys.readouterr()
    assert run(["generate", str(tmp_path / "run"), "--prompt", "The ", "--max-tokens", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("The ")


def test_a_changed_blend_must_be_acknowledged(work, tmp_path, capsys) -> None:
    assert train(work, f'["{work}/one_text_document"]', tmp_path / "run", "train.exit_iteration=1") == 0
    capsys.readouterr()
    changed = f'["{work}/one_text_document", "{work}/two_text_document"]'
    assert train(work, changed, tmp_path / "run") == 5
    assert 'checkpoint.accept_changes=["data.data_path"]' in capsys.readouterr().err
    assert train(work, changed, tmp_path / "run", 'checkpoint.accept_changes=["data.data_path"]') == 0


def test_another_tokenizer_than_the_data_was_made_with_is_refused(work, tmp_path, capsys) -> None:
    settings = [*SETTINGS, f'data.data_path=["{work}/one_text_document"]']
    code = run(["train", "--run-dir", str(tmp_path / "run"), *(p for text in settings for p in ("--set", text))])
    assert code not in (0, 1)
    shown = capsys.readouterr().err
    assert "GPT2BPETokenizer" in shown
    assert "ByteLevelTokenizer" in shown


def test_warnings_are_in_the_log_of_the_run(tmp_path, mt, caplog) -> None:
    """What a reader of log.txt alone would not know: that one document was divided into splits."""
    (tmp_path / "text.txt").write_text("one document of a few words. " * 40, encoding="utf-8")
    settings = [*SETTINGS, f'data.data_path=["{tmp_path / "text.txt"}"]']
    options = [part for text in settings for part in ("--set", text)]
    done = mt("train", "--run-dir", tmp_path / "run", *options)
    assert done.code == 0, done.err
    # The prompt of the sample is of the text, too: it was "def " of Python's.
    assert re.search(r"A sample:\n\n(one |document |of |a |few |words\. ?){4}", done.out), done.out
    warned = next(text for text in caplog.messages if "tokens are divided" in text)
    assert f"warning: {warned}\n" in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "1 document, too few" in warned
