"""The sums of digits of docs/guides/reinforcement-learning.md: a short form, and the whole page."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/guides/reinforcement-learning.md"


def commands_of_page() -> list[list[str]]:
    """Words of each command of the block that begins with the example."""
    (block,) = re.findall(r"```\n(python examples/digit_sums.py.*?)```", PAGE.read_text(), re.DOTALL)
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]


def followed(mt: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch, *keys: str) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of the run of reinforcement learning."""
    monkeypatch.chdir(folder)
    data, *trainings, table = commands_of_page()
    subprocess.run([sys.executable, str(ROOT / data[1]), data[2]], check=True)
    for words in trainings:
        done = mt(*words[1:], *keys)
        assert done.code == 0, done.err
    shown = mt(*table[1:], "--best", "2")
    assert shown.out.splitlines()[1].split()[1].count("+") == 2, shown.err
    return [json.loads(line) for line in Path("runs/digits/metrics.jsonl").read_text().splitlines()]


def sums(path: str) -> set[str]:
    return {json.loads(line)["prompt"] for line in Path(path).read_text().splitlines()}


@pytest.mark.slow
def test_a_few_steps_of_the_page(mt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 s: evaluated on held-out sums before the first step and behind the last."""
    keys = ("train.train_iters=3", "train.global_batch_size=256", "optimizer.lr=3e-3", "lr_schedule.lr_warmup_iters=0")
    lines = followed(mt, tmp_path, monkeypatch, *(part for key in keys for part in ("--set", key)))
    evaluations = [line for line in lines if line["kind"] == "valid"]
    assert [line["iteration"] for line in evaluations] == [0, 1, 2, 3]
    assert all(0.0 <= line["valid_reward"] <= 1.0 for line in evaluations)
    held_out = sums("digits/held-out.jsonl")
    assert len(held_out) == 100
    assert not held_out & (sums("digits/prompts.jsonl") | sums("digits/careless.jsonl"))


@pytest.mark.exhaustive
def test_the_page_learns(mt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """160 s"""
    values = [line["valid_reward"] for line in followed(mt, tmp_path, monkeypatch) if line["kind"] == "valid"]
    assert values[0] < 0.3
    assert values[-1] > 0.9
