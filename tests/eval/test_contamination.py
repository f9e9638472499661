"""Samples of a task that occur in a training set, in a case with known overlaps."""

from __future__ import annotations

import json
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
    assert "2 of 5 samples" in capsys.readouterr().out
    assert not output.with_suffix(".work").exists()
    assert run([*given, "--max-documents", "0"]) == 0
    assert [one["name"] for one in json.loads(output.read_text())["overlaps"]] == ["line 2", "line 4", "line 5"]


def test_a_key_that_is_missing(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, train = files
    given = ["eval", "contamination", str(task), "--train", str(train), "--output", str(tmp_path / "c.json")]
    assert run([*given, "--eval-keys", "passage"]) == 4
    assert "has none of --eval-keys passage" in capsys.readouterr().err
