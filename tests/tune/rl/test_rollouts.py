"""Runs of reinforcement learning: learning, checkpoints in the middle of a generation, what ends a run, bad input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.tune.rl.runs import config, write_task

from mt_core.errors import ConfigError, DataError, TrainingError
from mt_core.train import Callback, Trainer
from mt_core.train.callbacks import Run
from mt_tune.rl.rollout_file import ROLLOUTS_FILE, read_rollouts

pytestmark = pytest.mark.slow


class Lines(Callback):
    def __init__(self) -> None:
        self.lines: list[Mapping[str, Any]] = []

    def on_log(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self.lines.append(metrics)


def trained(folder: Path, *keys: str, run: str = "run", reward: str = "right") -> tuple[Trainer, list[Any]]:
    lines = Lines()
    trainer = Trainer(config(folder, *keys, reward=reward), run_dir=folder / run, callbacks=[lines])
    trainer.train()
    return trainer, lines.lines


def test_metrics_and_the_table_of_completions(tmp_path: Path) -> None:
    trainer, lines = trained(tmp_path)
    rollouts = read_rollouts(tmp_path / "run" / ROLLOUTS_FILE)
    assert len(rollouts) == 3 * 8
    for line in lines:
        of_step = [one for one in rollouts if one["step"] == line["iteration"]]
        assert line["reward"] == pytest.approx(sum(one["reward"] for one in of_step) / 8)
        assert line["completions/mean_length"] == sum(one["tokens"] for one in of_step) / 8
        assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-5)
        assert {one["versions"][0] for one in of_step} == {line["iteration"] - 1}
        for start in (0, 4):
            assert sum(one["advantage"] for one in of_step[start : start + 4]) == pytest.approx(0.0, abs=1e-5)
    assert trainer.last_evaluation["valid_reward"] == pytest.approx(-trainer.last_evaluation["valid_loss"])


@pytest.mark.long
@pytest.mark.parametrize("keys", [(), ("rl.advantage=rloo",), ("rl.advantage=reinforce_plus_plus", "rl.loss=cispo")])
def test_a_preference_for_some_tokens_is_learnt_by_rewards(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """2 s each: a new model draws such tokens by chance, and then nearly nothing else."""
    length = ("train.train_iters=40", "train.global_batch_size=32", "train.micro_batch_size=16", "rl.patience=0")
    _, lines = trained(
        tmp_path, *length, *keys, "optimizer.lr=0.02", "lr_schedule.lr_decay_style=constant", reward="low"
    )
    assert lines[0]["reward"] < 0.4
    assert lines[-1]["reward"] > 0.9


def test_a_run_resumed_within_a_generation_takes_the_same_steps(tmp_path: Path) -> None:
    """Two optimizer steps on each of two passes over a generation; the run stops after the first of four."""
    keys = ("rl.steps_per_generation=2", "rl.num_iterations=2", "train.train_iters=6", "checkpoint.save_interval=1")
    _, whole = trained(tmp_path, *keys, run="whole")
    _, first = trained(tmp_path, *keys, "train.exit_iteration=1", run="parts")
    _, rest = trained(tmp_path, *keys, run="parts")
    assert [line["loss"] for line in first + rest] == [line["loss"] for line in whole]
    assert [line["grad_norm"] for line in first + rest] == [line["grad_norm"] for line in whole]
    both = [read_rollouts(tmp_path / run / ROLLOUTS_FILE) for run in ("whole", "parts")]
    assert both[0] == both[1]


def test_without_a_bit_of_difference_to_generation(tmp_path: Path) -> None:
    """numerics.batch_invariant: the ratio of training to generation is exactly 1, after updates, at any temperature."""
    _, lines = trained(tmp_path, "numerics.batch_invariant=true", "rl.temperature=0.7")
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] == 0.0
        for name in ("min", "mean", "max"):
            assert line[f"sampling/importance_sampling_ratio/{name}"] == 1.0


def test_dynamic_sampling_draws_until_groups_differ(tmp_path: Path) -> None:
    _, lines = trained(tmp_path, "rl.dynamic_sampling=true", "rl.max_generations=2", "rl.patience=0", reward="equal")
    positions = {one["prompt_number"] for one in read_rollouts(tmp_path / "run" / ROLLOUTS_FILE)}
    # Two groups of two draws in each step; the batch is filled up with those drawn first.
    assert positions == {0, 1, 4, 5, 8, 9}
    assert all(line["grad_norm"] == 0.0 for line in lines)


@pytest.mark.parametrize(
    ("reward", "keys", "words"),
    [
        ("equal", (), r"equal rewards in 2 generations in a row \(rewards were 0.25\)"),
        ("right", ("rl.max_completion_length=1",), "reached rl.max_completion_length=1, and none ended"),
        ("short", (), 'reward "short"'),
        ("not_a_number", (), 'reward "not_a_number"'),
    ],
)
def test_what_ends_a_run(tmp_path: Path, reward: str, keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        trained(tmp_path, "rl.patience=2", *keys, reward=reward)
    if reward in ("equal", "right"):
        # The completions that ended it, which the message asks to look at, are in the file.
        assert {one["step"] for one in read_rollouts(tmp_path / "run" / ROLLOUTS_FILE)} == {1, 2}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": ""}, '"prompt" is empty'),
        ({"prompt": [{"role": "user", "content": " "}]}, r'message 1 of "prompt" \(user\) has no text'),
        ({"question": "1+1="}, 'has no prompt; a record has either "prompt"'),
        ({"prompt": "1", "messages": []}, "has prompt and messages"),
        ({"prompt": "1+" * 20}, "leave no room in data.seq_length=16"),
        ({"prompt": "1+" * 7}, "rl.max_completion_length=5"),
        ({"prompt": [{"role": "assistant", "content": "1"}]}, "ends with an answer"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    loaded = config(tmp_path, 'data.split="100,0,0"')
    prompts, _ = write_task(tmp_path)
    prompts.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=words) as caught:
        Trainer(loaded)
    assert "prompts.jsonl, line 1" in str(caught.value)


def test_messages_need_a_template_and_texts_beside_one_a_choice(tmp_path: Path) -> None:
    prompts, _ = write_task(tmp_path)
    loaded = config(tmp_path, 'data.split="100,0,0"')
    prompts.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1"}]}) + "\n")
    with pytest.raises(ConfigError, match="the tokenizer brings no chat template along"):
        Trainer(loaded)
    templated = config(tmp_path, 'data.split="100,0,0"', "data.chat_template=plain")
    prompts.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    with pytest.raises(DataError, match='data.prompt_format="user_message"'):
        Trainer(templated)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rl.group_size=3", "no whole number of groups of rl.group_size=3"),
        ("rl.beta=0.1", "the weights of checkpoint.load, which is not set"),
        ("rl.delta=1.1", "is not above 1"),
        ("train.batch_source=dataset", 'set train.batch_source .* to "rollouts"'),
        ("model.hidden_dropout=0.1", "set it to 0"),
        ("rl.sampling_correction_min=0.5", "has no effect with rl.sampling_correction=token_truncate"),
        ("rl.top_p=0.9", "rl.top_p"),
        ("rl.top_k=5", "rl.top_k"),
        ("rl.min_p=0.1", "rl.min_p"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, key)
