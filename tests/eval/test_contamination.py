"""Samples of a task that occur in a training set, in a case with known overlaps."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest

from mt_cli.main import run

COPIED = "the quick brown fox jumps over the lazy dog and runs into the dark forest at night"
OTHER = "nothing of this sentence stands in any of the documents that the model has been trained on"
TASK = [
    {"question": f"{OTHER}?", "answer": "no"},
    {"question": f"Who said: {COPIED}?", "answer": "she"},
    {"question": "Too short.", "answer": "yes"},
    {"question": "one two three four five six seven eight nine", "answer": "ten"},
    {"question": "this phrase is in each of the documents and so it is common to all", "answer": ""},
]
COMMON = "This phrase is in each of the documents, and so it is common to all."
TRAIN = [f"{COMMON} {n}" for n in range(4)] + [
    f"Once {COPIED.upper()}.",
    "one two three four five six seven eight nine",
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    task, train = tmp_path / "task.jsonl", tmp_path / "train.jsonl"
    task.write_text("".join(json.dumps(line) + "\n" for line in TASK))
    train.write_text("".join(json.dumps({"text": text}) + "\n" for text in TRAIN))
    return task, train


def test_which_samples_occur(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, train = files
    output = tmp_path / "contamination.json"
    given = [
        "eval",
        "contamination",
        str(task),
        "--train",
        str(train),
        "--output",
        str(output),
        "--eval-keys",
        "question",
    ]
    assert run([*given, "--max-documents", "3"]) == 0
    found = json.loads(output.read_text())
    assert (found["samples"], found["too_short"], found["contaminated"]) == (5, 1, 2)
    copied, short = found["overlaps"]
    words = len(COPIED.split())
    assert (copied["name"], copied["ngrams"]) == ("line 2", words + 2 - 12)
    assert copied["share"] == pytest.approx((words - 12) / (words + 2 - 12))
    assert copied["words"] == " ".join(COPIED.split()[:13])
    assert (short["name"], short["share"]) == ("line 4", 1.0)
    common = found["ignored_as_common"]
    words = len(COMMON.split())
    assert (common["ngrams"], common["samples"]) == (words - 12, 1)
    assert [(one["name"], one["share"]) for one in common["overlaps"]] == [("line 5", 1.0)]
    printed = capsys.readouterr().out
    assert "2 of 5 samples" in printed
    assert f"{words - 12} n-grams of 1 samples are in more training documents" in printed
    assert not output.with_suffix(".work").exists()
    assert run([*given, "--max-documents", "0"]) == 0
    assert [one["name"] for one in json.loads(output.read_text())["overlaps"]] == ["line 2", "line 4", "line 5"]


def test_a_key_that_is_missing(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, train = files
    given = ["eval", "contamination", str(task), "--train", str(train), "--output", str(tmp_path / "c.json")]
    assert run([*given, "--eval-keys", "passage"]) == 4
    assert "has none of --eval-keys passage" in capsys.readouterr().err


WORDS = "Ärger über große Öfen, ﬁnal cafés naïve façades ブドウガ パン Åse coöperate ÉTÉ jalapeño ＡＢＣ 한국어 text"


@pytest.mark.parametrize("of_task", ["NFC", "NFD", "NFKC", "NFKD"])
@pytest.mark.parametrize("of_training", ["NFC", "NFD", "NFKC", "NFKD"])
def test_texts_of_another_unicode_form_are_found(of_task: str, of_training: str, tmp_path: Path) -> None:
    task, train, output = tmp_path / "task.jsonl", tmp_path / "train.jsonl", tmp_path / "found.json"
    task.write_text(json.dumps({"question": unicodedata.normalize(of_task, WORDS)}))
    train.write_text(json.dumps({"text": unicodedata.normalize(of_training, f"Vor dem Text: {WORDS} und weiter")}))
    given = ["eval", "contamination", str(task), "--train", str(train), "--output", str(output)]
    assert run([*given, "--eval-keys", "question"]) == 0
    assert [one["share"] for one in json.loads(output.read_text())["overlaps"]] == [1.0]
