"""`mt verify` of configurations of reinforcement learning, and steps of different sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tune.rl.runs import config, write_task

from mt_core.errors import ConfigError
from mt_core.train import Trainer
from mt_tune.rl.batching import planned_steps
from mt_tune.rl.rollout_file import ROLLOUTS_FILE, read_rollouts

CONFIG = """
preset = "gpt-tiny"
[model]
hidden_dropout = 0
attention_dropout = 0
max_position_embeddings = 64
[parallel]
tensor_model_parallel_size = 2
[data]
dataset_type = "prompts"
data_path = [{prompts}]
split = "12,4,0"
seq_length = 64
[train]
train_iters = 20
global_batch_size = 64
loss = "policy"
batch_source = "rollouts"
loss_normalization = "sequences"
[rl]
group_size = 16
max_completion_length = 40
steps_per_generation = 2
num_iterations = 2
[rewards]
functions = ["exact_match"]
"""


NO_WARMUP = "lr_schedule.lr_warmup_iters=null"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    prompts, _ = write_task(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(prompts=json.dumps(str(prompts))))
    return path


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("what", ["layout", "resume"])
def test_a_small_run_is_verified(mt: Callable[..., Any], file: Path, what: str) -> None:
    """4 s, and 8."""
    outcome = mt("verify", what, file, *(("--steps", 2) if what == "layout" else ()))
    assert outcome.code == 0, outcome.out + outcome.err
    assert outcome.out.rstrip().endswith("the same")


def test_steps_on_a_generation_go_through_its_rows() -> None:
    assert planned_steps([2, 2, 2, 2], 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert planned_steps([2, 4, 4], 6) == [[0, 1], [2, 3, 4, 5], [0, 1, 2, 3]]


@pytest.mark.slow
def test_a_growing_batch_has_more_groups(tmp_path: Path) -> None:
    """1 s"""
    keys = ("train.train_iters=null", "train.train_samples=20", "train.rampup_batch_size=[4,4,4]", NO_WARMUP)
    Trainer(config(tmp_path, *keys, "train.micro_batch_size=2"), run_dir=tmp_path / "run").train()
    steps = [one["step"] for one in read_rollouts(tmp_path / "run" / ROLLOUTS_FILE)]
    assert [steps.count(step) for step in (1, 2, 3)] == [4, 8, 8]
    with pytest.raises(ConfigError, match="2 completions are no whole number of groups"):
        config(tmp_path, *keys, "train.rampup_batch_size=[2,2,4]", "train.micro_batch_size=2")
