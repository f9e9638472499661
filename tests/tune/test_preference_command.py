"""`mt tune dpo` and `mt tune orpo` as a user types them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tune.preference_runs import write_pairs


@pytest.mark.parametrize(
    ("arguments", "train", "preference"),
    [
        (["dpo"], {"loss": "preference", "batch_source": "reference"}, {"loss": ["sigmoid"]}),
        (
            ["dpo", "--loss", "sigmoid", "--loss", "sft", "--beta", "0.3", "--reference", "model"],
            {"loss": "preference", "batch_source": "reference"},
            {"loss": ["sigmoid", "sft"], "beta": 0.3, "reference": "model"},
        ),
        (["orpo"], {"loss": "preference", "batch_source": "dataset"}, {"loss": ["orpo"]}),
        (["orpo", "--loss", "simpo"], {"loss": "preference", "batch_source": "dataset"}, {"loss": ["simpo"]}),
    ],
)
def test_the_configuration_that_a_command_stands_for(
    mt: Callable[..., Any], tmp_path: Path, arguments: list[str], train: dict[str, Any], preference: dict[str, Any]
) -> None:
    name, *options = arguments
    shown = mt("tune", name, "gpt-tiny", str(write_pairs(tmp_path)), "--show", *options)
    assert shown.code == 0, shown.err
    config = tomllib.loads(shown.out)
    assert {key: config["train"][key] for key in train} == train
    assert config["preference"] == preference
    assert config["data"]["dataset_type"] == "preference"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dataset"), [("dpo", "preference"), ("kto", "unpaired_preference")])
def test_without_data_synthetic_records_are_written_and_used(
    mt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dataset: str
) -> None:
    """Their words are those of the preset's own splits; options win over what comes with them."""
    monkeypatch.chdir(tmp_path)
    shown = mt("tune", name, "instructions-tiny", "--show", "--steps", "7", "--batch-size", "2")
    assert shown.code == 0, shown.err
    config = tomllib.loads(shown.out)
    assert config["train"]["train_iters"] == 7
    assert config["optimizer"]["lr"] == 1e-3
    questions = []
    for key, split in (("train_data_path", "train"), ("valid_data_path", "valid")):
        (path,) = config["data"][key]
        assert path == f"runs/example-data/{dataset}-{split}.jsonl"
        records = [json.loads(line) for line in Path(path).read_text().splitlines()]
        questions.append({record["prompt"][0]["content"] for record in records})
        for record in records:
            right = record["chosen"] if name == "dpo" else record["completion"]
            assert right[0]["content"].endswith(".") == (name == "dpo" or record["label"])
    assert not questions[0] & questions[1]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("layout", "dpo"),
        pytest.param("layout", "kto", marks=pytest.mark.exhaustive),
        pytest.param("resume", "dpo", marks=pytest.mark.exhaustive),
        pytest.param("resume", "kto", marks=pytest.mark.exhaustive),
    ],
)
def test_a_configuration_of_preferences_is_verified(
    mt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, name: str
) -> None:
    """Answers of the user's stay whole in the small run. About 4 s."""
    monkeypatch.chdir(tmp_path)
    layout = ["--set", "parallel.tensor_model_parallel_size=2", "--nproc", "2", "--steps", "8", "--seq-length", "192"]
    assert mt("tune", name, "instructions-tiny", *layout, "-o", "run.toml").code == 0
    outcome = mt("verify", what, "run.toml", *(("--steps", 2) if what == "layout" else ()))
    assert outcome.code == 0, outcome.out + outcome.err
    assert outcome.out.rstrip().endswith("the same")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dpo", "--loss", "orpo"], "has no reference; use mt tune orpo"),
        (["orpo", "--loss", "ipo"], "has a reference; use mt tune dpo"),
        (["orpo", "--reference", "model"], "has no effect"),
        (["dpo", "--loss", "dpo"], "losses are sigmoid"),
    ],
)
def test_a_contradiction_is_refused(mt: Callable[..., Any], tmp_path: Path, arguments: list[str], words: str) -> None:
    name, *options = arguments
    refused = mt("tune", name, "gpt-tiny", str(write_pairs(tmp_path)), "--show", *options)
    assert refused.code == 2
    assert words in refused.err


def test_a_refused_command_leaves_runs_as_they_are(mt: Callable[..., Any], tmp_path: Path) -> None:
    """And no folder of a run that never began."""
    pairs, run = str(write_pairs(tmp_path)), tmp_path / "run"
    refused = mt("tune", "dpo", "gpt-tiny", pairs, "--run-dir", str(run), "--set", "optimizer.lr=-1")
    assert (refused.code, run.exists()) == (2, False)
    run.mkdir()
    (run / "tune.toml").write_text("of the run")
    (run / "config.json").write_text("{}")
    assert mt("tune", "dpo", "gpt-tiny", pairs, "--run-dir", str(run), "--set", "optimizer.lr=-1").code == 2
    assert (run / "tune.toml").read_text() == "of the run"


def test_a_bad_record_is_named_once(mt: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "1", "chosen": "2"}\n' * 8)
    refused = mt("tune", "dpo", "gpt-tiny", str(path), "--show")
    assert refused.code == 4
    assert refused.err.count("bad.jsonl, line 1") == 1


@pytest.mark.slow
def test_a_preference_is_learnt_in_seconds(mt: Callable[..., Any], tmp_path: Path) -> None:
    """About 5 s: a few steps of gpt-tiny prefer numbers to refusals on pairs that are held out."""
    run = str(tmp_path / "run")
    length = ("--steps", "8", "--lr", "1e-3", "--seq-length", "128", "--batch-size", "4", "--hold-out", "25")
    trained = mt("tune", "dpo", "gpt-tiny", str(write_pairs(tmp_path)), "--run-dir", run, *length)
    assert trained.code == 0, trained.err
    assert "valid rewards/accuracies 1.0000" in trained.out


def test_the_configuration_of_kto(mt: Callable[..., Any], tmp_path: Path) -> None:
    data = tmp_path / "answers.jsonl"
    data.write_text(
        "".join(f'{{"prompt": "{n}?", "completion": "yes", "label": {str(n > 4).lower()}}}\n' for n in range(9))
    )
    shown = mt("tune", "kto", "gpt-tiny", str(data), "--show", "--desirable-weight", "1.3", "--loss", "bco")
    assert shown.code == 0, shown.err
    config = tomllib.loads(shown.out)
    assert config["preference"] == {"unpaired_loss": "bco", "desirable_weight": 1.3}
    assert {key: config["train"][key] for key in ("loss", "batch_source")} == {
        "loss": "unpaired_preference",
        "batch_source": "unpaired_reference",
    }
    data.write_text('{"prompt": "1?", "completion": "yes", "label": "good"}\n')
    refused = mt("tune", "kto", "gpt-tiny", str(data), "--show")
    assert refused.code != 0
    assert "\"label\" is 'good'" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "found"), [("kto", r"valid rewards/margins [1-9]"), ("reward", r"valid accuracy 1\.0")]
)
def test_labels_and_rewards_are_learnt_in_seconds(
    mt: Callable[..., Any], tmp_path: Path, command: str, found: str
) -> None:
    """About 6 s each: 15 steps of gpt-tiny on records of which some are held out."""
    data = write_pairs(tmp_path)
    if command == "kto":
        pairs = [json.loads(line) for line in data.read_text().splitlines()]
        answers = [
            {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for pair in pairs
            for side in ("chosen", "rejected")
        ]
        data.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    length = ("--steps", "15", "--lr", "1e-3", "--seq-length", "128", "--batch-size", "4", "--hold-out", "25")
    trained = mt("tune", command, "gpt-tiny", str(data), "--run-dir", str(tmp_path / "run"), *length)
    assert trained.code == 0, trained.err
    assert re.search(found, trained.out), trained.out
