"""`mt tune grpo` and `mt rollouts` as a user types them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tune.rl.runs import write_task

from mt_tune.commands.grpo import ALGORITHMS
from mt_tune.commands.rollouts import chosen
from mt_tune.rl.rollout_file import read_rollouts


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_keys(mt: Callable[..., Any], tmp_path: Path, name: str) -> None:
    prompts, rewards = write_task(tmp_path)
    shown = mt("tune", "grpo", "gpt-tiny", str(prompts), "--reward", f"{rewards}:right", "--algorithm", name, "--show")
    assert shown.code == 0, shown.err
    config = tomllib.loads(shown.out)
    keys, normalization = ALGORITHMS[name]
    assert {key: config["rl"][key] for key in keys} == keys
    assert config["train"]["loss_normalization"] == normalization
    assert config["rewards"] == {"functions": ["judges:right"], "modules": [str(rewards)]}
    assert config["train"]["global_batch_size"] == 64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs --reward"),
        (["--reward", "accuracy", "--algorithm", "ppo2"], "it can be grpo, dapo"),
        (["--reward", "./absent"], "--reward ./absent: there is no such folder; a reward is a registered name"),
        (["--reward", "absent.py:f"], "--reward absent.py:f: there is no file absent.py"),
        (["--reward", "judges.py"], "names a file alone; write judges.py:NAME"),
        (["--reward", "acuracy"], 'did you mean "accuracy"'),
        # What training would refuse is not shown either.
        (["--reward", "accuracy", "--set", "rl.epsilon=-1"], "rl.epsilon"),
        # Of the length that was asked for, not of the model's 512 positions.
        (["--reward", "accuracy", "--seq-length", "8", "--max-completion-length", "9"], "data.seq_length=8"),
    ],
)
def test_what_is_missing_is_named(
    mt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # A folder of the name of a reward is not taken for the folder of a model.
    (tmp_path / "accuracy").mkdir()
    refused = mt("tune", "grpo", "gpt-tiny", str(write_task(tmp_path)[0]), "--show", *arguments)
    assert refused.code
    assert words in refused.err


def test_what_is_derived_follows_values_of_set(mt: Callable[..., Any], tmp_path: Path) -> None:
    prompts, rewards = write_task(tmp_path)
    command = ["tune", "grpo", "gpt-tiny", str(prompts), "--reward", f"{rewards}:right", "--algorithm", "dr_grpo"]
    values = ("rl.group_size=2", "train.global_batch_size=4", "train.train_iters=2", "rl.max_completion_length=3")
    shown = mt(*command, "--show", *(part for value in values for part in ("--set", value)))
    assert shown.code == 0, shown.err
    config = tomllib.loads(shown.out)
    # Two completions of a prompt at once; prompts of 4 bytes and 3 tokens more, of which the last is no input.
    assert (config["train"]["micro_batch_size"], config["data"]["seq_length"]) == (2, 8)
    assert (config["train"]["loss_divisor"], config["train"]["eval_interval"]) == (12.0, 1)
    assert "2 steps of 4 completions, 2 of each prompt" in shown.err


def test_completions_fit_into_few_positions(mt: Callable[..., Any], tmp_path: Path) -> None:
    prompts, rewards = write_task(tmp_path)
    command = ["tune", "grpo", "gpt-tiny", str(prompts), "--reward", f"{rewards}:right", "--show"]
    shown = mt(*command, "--set", "model.max_position_embeddings=64")
    assert shown.code == 0, shown.err
    config = tomllib.loads(shown.out)
    assert (config["rl"]["max_completion_length"], config["data"]["seq_length"]) == (61, 64)


def line(step: int, number: int, reward: float | None, completion: str = "4") -> dict[str, Any]:
    of_prompt = {"prompt_number": step, "completion_number": number, "prompt": "2+2=", "source": "p.jsonl, line 1"}
    judged = {"reward": reward, "rewards": {"right": reward}, "advantage": 0.5}
    return {"step": step, **of_prompt, "completion": completion, **judged, "tokens": 2, "finish": "stop"}


def test_completions_are_chosen_and_the_last_of_equal_lines_counts(mt: Callable[..., Any], tmp_path: Path) -> None:
    lines = [line(1, 0, 0.0), line(1, 1, 1.0), line(2, 0, 0.2, "old"), line(2, 0, 0.3, "new"), line(2, 1, None)]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines) + '{"step": 3, "pro')
    read = read_rollouts(path)
    assert [(one["step"], one["completion"]) for one in read] == [(1, "4"), (1, "4"), (2, "new"), (2, "4")]
    assert [one["reward"] for one in chosen(read, None, 2, None, None)] == [1.0, 0.3]
    assert [one["reward"] for one in chosen(read, None, None, 1, None)] == [0.0]
    assert [one["reward"] for one in chosen(read, 1, None, None, None)] == [0.0, 1.0]
    shown = mt("rollouts", str(tmp_path))
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[0].split() == ["step", "prompt", "completion", "reward", "advantage", "tokens", "end"]
    assert shown.out.splitlines()[1].split() == ["2", "2+2=", "new", "0.3", "0.5", "2", "stop"]
    missing = mt("rollouts", str(tmp_path), "--find", "9+9")
    assert missing.code == 4
    assert "no such completion" in missing.err
