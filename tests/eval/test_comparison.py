"""Paired bootstrap against a loop in plain Python and a case worked out by hand."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mt_cli.main import run
from mt_core.errors import DataError
from mt_eval.comparison import Bootstrap, compare, paired_bootstrap
from mt_eval.tasks import Journal, Sample


def write(path: Path, samples: Sequence[Sample], data_hash: str = "h", task: str = "t") -> Path:
    with Journal(path.with_suffix(".samples.jsonl"), {"tasks": {task: {"data_hash": data_hash}}}) as journal:
        for sample in samples:
            journal.add(task, sample)
    return path


def test_intervals_are_those_of_a_plain_loop() -> None:
    draw = random.Random(1)
    first = [draw.gauss(0, 1) for _ in range(40)]
    second = [value + draw.gauss(0.3, 0.5) for value in first]
    weights = [draw.randint(1, 9) for _ in range(40)]
    means = []
    for _ in range(4000):
        chosen = draw.choices(range(40), k=40)
        total = sum(weights[one] for one in chosen)
        means.append(sum(weights[one] * (second[one] - first[one]) for one in chosen) / total)
    means.sort()
    found = paired_bootstrap(np.array(first), np.array(second), np.array(weights), Bootstrap(resamples=8000))
    assert found == pytest.approx((means[100], means[3900]), abs=0.02)


def test_all_resamples_of_two_samples() -> None:
    """Of differences 0 and 1 the drawn means are 0 (a quarter), 0.5 (half) and 1 (a quarter)."""
    pair = np.array([0.0, 0.0]), np.array([0.0, 1.0]), np.ones(2)
    assert paired_bootstrap(*pair, Bootstrap(confidence=0.6)) == (0.0, 1.0)
    assert paired_bootstrap(*pair, Bootstrap(confidence=0.4)) == (0.5, 0.5)


HUGE_SEED = ("--seed", str(10**30))


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "compare", "a.json", "b.json", *HUGE_SEED),
        ("eval", "compare", "a.json", "b.json", "--seed", "-1"),
        ("eval", "harness", "run", "--tasks", "t", *HUGE_SEED),
        ("eval", "finetune", "a.toml", *HUGE_SEED),
        ("eval", "detoxify", "run", *HUGE_SEED),
        ("data", "dedup", "a.jsonl", "--output", "o", *HUGE_SEED),
    ],
)
def test_a_seed_that_cannot_be_is_a_sentence(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(list(words)) in (1, 2)
    said = capsys.readouterr().err
    assert "--seed" in said
    assert "4294967295" in said or "greater than or equal to 0" in said


def test_metrics_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same difference for each sample has an interval of one point; perplexities are a ratio."""
    values = [(0.0, -2.0, 3), (1.0, -4.0, 1), (1.0, -1.0, 2)]
    ours = [Sample(f"{n}", {"accuracy": a, "log_likelihood": b}, w) for n, (a, b, w) in enumerate(values)]
    theirs = [Sample(f"{n}", {"accuracy": a, "log_likelihood": b + 0.5}, w) for n, (a, b, w) in enumerate(values)]
    theirs.append(Sample("3", error="no text"))
    ours.append(Sample("3", {"accuracy": 1.0}))
    first, second = write(tmp_path / "a.json", ours), write(tmp_path / "b.json", theirs)
    found = compare(first, second, Bootstrap(resamples=50))["t"]
    mean = (3 * -2 - 4 + 2 * -1) / 6
    perplexity = found["perplexity"]
    assert (perplexity.first, perplexity.second) == pytest.approx((math.exp(-mean), math.exp(-mean - 0.5)))
    assert (perplexity.low, perplexity.difference, perplexity.high) == pytest.approx((math.exp(-0.5),) * 3)
    assert (found["accuracy"].difference, found["accuracy"].samples, found["accuracy"].not_scored) == (0.0, 3, 1)
    assert run(["eval", "compare", str(first), str(second), "--json", "--resamples", "50"]) == 0
    shown = json.loads(capsys.readouterr().out)["tasks"]["t"]
    assert shown["perplexity"]["high"] == pytest.approx(math.exp(-0.5))
    assert run(["eval", "compare", str(first), str(second)]) == 0
    assert "x 0.6065" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "data_hash", "task", "message"),
    [
        ([Sample("0", {"accuracy": 1.0})], "h", "t", "has 2 samples, .* 1"),
        ([Sample("0", {"accuracy": 1.0}), Sample("2", {"accuracy": 1.0})], "h", "t", "has '1', .* has '2'"),
        (
            [Sample("0", {"accuracy": 1.0}, 2.0), Sample("1", {"accuracy": 1.0})],
            "h",
            "t",
            "another tokenizer or window",
        ),
        ([Sample("0", {"accuracy": 1.0}), Sample("1", {"accuracy": 1.0})], "x", "t", "different data"),
        ([Sample("0", {"accuracy": 1.0}), Sample("1", {"accuracy": 1.0})], "h", "u", "alone has task t"),
        ([], "h", "t", "no samples to compare"),
    ],
)
def test_other_samples_are_refused(
    tmp_path: Path, other: list[Sample], data_hash: str, task: str, message: str
) -> None:
    first = write(tmp_path / "a.json", [Sample("0", {"accuracy": 1.0}), Sample("1", {"accuracy": 1.0})])
    second = write(tmp_path / "b.json", other, data_hash, task)
    with pytest.raises(DataError, match=message):
        compare(first, second, Bootstrap())


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.samples\.jsonl cannot be read"):
        compare(tmp_path / "missing.json", tmp_path / "missing.json", Bootstrap())
