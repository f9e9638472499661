"""mt eval classification, ensemble and finetune, on a task that a small model learns."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.rule_tasks import mnli_settings, write_mnli

from mt_cli import main
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_core.train import Trainer
from mt_core.train.trained_model import load_trained_model
from mt_eval.detoxification.scorers import build_classifier
from mt_eval.evaluation import read_evaluation

LABELS = ["contradiction", "entailment", "neutral"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of one short epoch, so that its model is sometimes wrong, and files of the task."""
    folder = tmp_path_factory.mktemp("classification")
    settings = [*mnli_settings(folder), "train.train_epochs=1", "optimizer.lr=2e-3"]
    Trainer(load_config(preset="mnli-bert-tiny", overrides=settings), run_dir=folder / "run").train()
    write_mnli(folder / "test.tsv", 9, 7)
    unlabelled = [line.rpartition("\t")[0] for line in (folder / "test.tsv").read_text().splitlines()]
    (folder / "test.tsv").write_text("\n".join(unlabelled) + "\n")
    return folder


@pytest.fixture(scope="module")
def evaluated(folder) -> Path:
    """The results of one command for both development sets."""
    data = [part for name in ("matched", "mismatched") for part in ("--data", str(folder / f"{name}.tsv"))]
    files = ["--predictions", str(folder / "predictions"), "--output", str(folder / "scores.json")]
    assert main.run(["eval", "classification", str(folder / "run" / "best"), *data, *files]) == 0
    return folder / "scores.json"


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_predictions_are_the_models_and_scores_are_theirs(folder, evaluated) -> None:
    """Logits by a forward pass of one sample; accuracy and loss by hand from the written lines."""
    trained = load_trained_model(folder / "run", load_plugins())
    encode = trained.tokenizer.encode
    scores = read_evaluation(evaluated).tasks
    right = {}
    for name, count in (("matched", 50), ("mismatched", 31)):
        rows = [line.split("\t") for line in (folder / f"{name}.tsv").read_text().splitlines()[1:]]
        lines = lines_of(folder / "predictions" / f"{name}.jsonl")
        assert [line["uid"] for line in lines] == list(range(count))
        assert [LABELS[line["label"]] for line in lines] == [row[-1] for row in rows]
        a, b = (encode(text) for text in rows[3][2:4])
        tokens = torch.tensor([[2, *a, 3, *b, 3]])
        types = torch.tensor([[0] * (len(a) + 2) + [1] * (len(b) + 1)])
        with torch.no_grad():
            logits = trained.model(tokens, types)[0].tolist()
        assert lines[3]["logits"] == pytest.approx(logits, abs=1e-5)
        exponentials = [math.exp(value) for value in logits]
        assert lines[3]["softmax"] == pytest.approx([e / sum(exponentials) for e in exponentials], abs=1e-5)
        right[name] = sum(line["prediction"] == line["label"] for line in lines)
        assert scores[name].metrics["accuracy"] == pytest.approx(right[name] / count)
        loss = statistics.fmean(-math.log(line["softmax"][line["label"]]) for line in lines)
        assert scores[name].metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert scores[name].samples == count
    assert 0 < sum(right.values()) < 81
    assert scores["overall"].metrics["accuracy"] == pytest.approx(sum(right.values()) / 81)


def test_results_have_provenance_and_samples(evaluated) -> None:
    evaluation = read_evaluation(evaluated)
    assert evaluation.provenance["checkpoint_hash"]
    matched, mismatched = (evaluation.tasks[name].settings for name in ("matched", "mismatched"))
    assert matched["task"] == "mnli"
    assert matched["data_hash"] != mismatched["data_hash"]
    samples = lines_of(evaluated.with_suffix(".samples.jsonl"))[1:]
    assert len(samples) == 81
    of_set = [line["values"]["accuracy"] for line in samples if line["task"] == "matched"]
    assert statistics.fmean(of_set) == pytest.approx(evaluation.tasks["matched"].metrics["accuracy"])


def test_texts_that_were_cut_are_counted(folder, tmp_path) -> None:
    output = tmp_path / "short.json"
    command = ["eval", "classification", str(folder / "run"), "--data", str(folder / "matched.tsv")]
    assert main.run([*command, "--set", "data.seq_length=8", "--output", str(output)]) == 0
    assert read_evaluation(output).tasks["matched"].truncated == 50


def test_a_model_for_pairs_of_texts_scores_no_texts(folder) -> None:
    with pytest.raises(ConfigError, match="data.dataset_type=mnli; a scorer is a model with classes of single texts"):
        build_classifier({"checkpoint": str(folder / "run")}, load_plugins())


def test_a_test_set_without_labels_gives_predictions_only(folder, tmp_path, capsys) -> None:
    command = ["eval", "classification", str(folder / "run"), "--data", str(folder / "test.tsv")]
    assert main.run([*command, "--predictions", str(tmp_path)]) == 0
    assert "9 samples could not be scored; 0: it has no label" in " ".join(capsys.readouterr().out.split())
    assert [line["label"] for line in lines_of(tmp_path / "test.jsonl")] == [None] * 9
    assert main.run(command) != 0
    assert "has a label, so that nothing can be scored; give --predictions" in " ".join(capsys.readouterr().err.split())


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps({"truncated": False, "label": 1, **row}) + "\n" for row in rows))
    return path


def test_an_ensemble_averages_probabilities(tmp_path, capsys) -> None:
    # Probabilities of class 1: 0.9 and 0.2, mean 0.55; 0.6 and 0.3, mean 0.45.
    odds = [[0.9, 0.6], [0.2, 0.3]]
    files = [
        write(
            tmp_path / f"{n}.jsonl", *({"uid": uid, "logits": [0, math.log(p / (1 - p))]} for uid, p in enumerate(of))
        )
        for n, of in enumerate(odds)
    ]
    command = ["eval", "ensemble", *map(str, files), "--output"]
    assert main.run([*command, str(tmp_path / "both.jsonl"), "--metric", "accuracy", "--metric", "f1"]) == 0
    said = capsys.readouterr().out
    assert "accuracy 0.5000" in said
    assert f"f1 {2 / 3:.4f}" in said
    found = [line["softmax"][1] for line in lines_of(tmp_path / "both.jsonl")]
    np.testing.assert_allclose(found, [0.55, 0.45], atol=1e-6)
    assert main.run([*command, str(tmp_path / "both.tsv")]) == 0
    assert (tmp_path / "both.tsv").read_text() == "id\tlabel\n0\t1\n1\t0\n"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([{"uid": 5, "logits": [0, 1]}], "have predictions for different samples, such as 0, 5"),
        ([{"uid": 0, "logits": [0, 1, 2]}], "has 2 logits a sample and"),
        ([{"uid": 0, "logits": [0, 1], "label": 0}], "have different labels for the same samples"),
        ([{"uid": 0}], "line 1: no prediction with uid, label, logits and truncated"),
        ([], "has no predictions"),
    ],
)
def test_predictions_that_do_not_fit(tmp_path, capsys, other, words) -> None:
    first = write(tmp_path / "first.jsonl", {"uid": 0, "logits": [0, 1]})
    assert main.run(["eval", "ensemble", str(first), str(write(tmp_path / "other.jsonl", *other))]) != 0
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_seeds_have_a_mean_and_a_deviation(folder, tmp_path, capsys) -> None:
    settings = [*mnli_settings(folder), "train.train_epochs=2", "optimizer.lr=1e-3"]
    command = ["eval", "finetune", "--preset", "mnli-bert-tiny", "--run-dir", str(tmp_path)]
    command += [part for setting in settings for part in ("--set", setting)]
    command += [part for seed in (1, 2, 3) for part in ("--seed", str(seed))]
    assert main.run([*command, "--output", str(tmp_path / "seeds.json")]) == 0
    tasks = read_evaluation(tmp_path / "seeds.json").tasks
    found = [tasks[f"seed-{seed}"].metrics["overall_accuracy"] for seed in (1, 2, 3)]
    assert len(set(found)) > 1, "seeds decide the order of samples and the first weights"
    mean = sum(found) / 3
    assert tasks["all"].metrics["overall_accuracy"] == pytest.approx(mean)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in found) / 2)
    assert tasks["all"].metrics["overall_accuracy_stdev"] == pytest.approx(deviation)
    for seed, value in zip((1, 2, 3), found, strict=True):
        best = json.loads((tmp_path / f"seed-{seed}" / "checkpoints" / "best.json").read_text())
        assert best["value"] == value
    # Complete runs are read again, not trained.
    assert main.run([*command, "--output", str(tmp_path / "again.json")]) == 0
    assert read_evaluation(tmp_path / "again.json").tasks == tasks


def test_no_other_seed_follows_a_run_that_was_stopped(folder, tmp_path, capsys) -> None:
    settings = [*mnli_settings(folder), "train.exit_iteration=1"]
    command = ["eval", "finetune", "--preset", "mnli-bert-tiny", "--run-dir", str(tmp_path), "--seed", "1", "--seed"]
    assert main.run([*command, "2", *(part for setting in settings for part in ("--set", setting))]) == 6
    assert "seed 1 was stopped by train.exit_iteration=1 after step 1" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["seed-1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "{folder}/none.tsv"], "none.tsv"),
        (["--data", "{folder}/vocab.txt"], "no column index"),
        (["--data", "{folder}/matched.tsv", "--task", "qqp"], "num_classes=3 does not fit data.dataset_type=qqp"),
        (["--data", "{folder}/matched.tsv", "--task", "race"], "use model.family=bert_multiple_choice"),
        (["--data", "{folder}/matched.tsv", "--data", "{folder}/matched.tsv"], "have one name, of matched, matched"),
        (["--data", "x.tsv", "--task", "gpt"], "--task gpt: its samples have no label to choose"),
        (["--data", "{folder}/matched.tsv", "--set", "data.seq_length=40"], "seq_length=40 is longer than model."),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated(folder, capsys, arguments, words) -> None:
    given = [argument.format(folder=folder) for argument in arguments]
    assert main.run(["eval", "classification", str(folder / "run"), *given]) != 0
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "command", ["classification PATH --data a=x.tsv", "finetune my.toml --seed 1", "ppl PATH --data x"]
)
def test_ranks_run_the_same_command(monkeypatch, command) -> None:
    launched = []
    monkeypatch.setattr("mt_core.launch.local.launch", lambda nproc, words: launched.append((nproc, words)) or 0)
    assert main.run(["eval", *command.split(), "--nproc", "2"]) == 0
    assert launched == [(2, ["eval", *command.split()])]
