"""Callbacks that record values, that have state in checkpoints, and that run on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mt_core.config import load_config
from mt_core.config.loading import LoadedConfig
from mt_core.errors import ConfigError, PluginError, TrainingError
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer
from mt_core.train.common_callbacks import EarlyStop
from mt_core.train.recorded import RecordedMetrics

WORLD = ParallelContext().world


def tiny(*overrides: str) -> LoadedConfig:
    small = ("num_layers=1", "hidden_size=16", "num_attention_heads=2", "max_position_embeddings=16")
    common = (
        "data.seq_length=16",
        "data.corpus_bytes=200000",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "logging.log_interval=2",
    )
    keys = [f"model.{key}" for key in small] + list(common) + ["train.sample_prompt=null"]
    return load_config(preset="gpt-tiny", overrides=[*keys, *overrides])


def test_each_reduction_by_hand() -> None:
    recorded = RecordedMetrics()
    for value in (3.0, -1.0, 4.0):
        for reduce in ("mean", "sum", "max", "min"):
            recorded.add(f"of_{reduce}", value, reduce)  # type: ignore[arg-type]
    assert recorded.take(WORLD) == {"of_mean": 2.0, "of_sum": 6.0, "of_max": 4.0, "of_min": -1.0}
    assert recorded.take(WORLD) == {}, "nothing is kept"


def test_a_wrong_reduction_is_named() -> None:
    recorded = RecordedMetrics()
    with pytest.raises(TrainingError, match="reduce='median'.: it can be mean, sum, max, min"):
        recorded.add("x", 1.0, "median")  # type: ignore[arg-type]
    recorded.add("x", 1.0, "sum")
    with pytest.raises(TrainingError, match="record.'x'.: recorded with reduce='sum' and with 'mean'"):
        recorded.add("x", 1.0, "mean")


class Records(Callback):
    """Records on each step, and keeps the lines of the log."""

    def __init__(self, value: float) -> None:
        self.value, self.lines = value, list[dict[str, Any]]()

    def on_step_end(self, run: Any, metrics: Mapping[str, Any]) -> None:
        run.record("steps", 1.0, "sum")
        run.record("value", self.value)
        run.record("largest", self.value, "max")

    def on_log(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.lines.append(dict(metrics))


@pytest.mark.parametrize(
    ("state", "words"),
    [({"t": object()}, "not JSON serializable"), ({1: 2}, "not the same after JSON"), ({"x": float("nan")}, "JSON")],
)
def test_a_state_that_no_checkpoint_can_keep_is_refused_at_the_start(state: dict[Any, Any], words: str) -> None:
    callback = Records(1.0)
    callback.state_dict = lambda: state  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=words) as refused:
        Trainer(tiny("train.train_iters=2"), callbacks=[callback]).train()
    assert "Records.0.state_dict()" in str(refused.value)
    assert callback.lines == []


def clash_on_rank(rank: int, world: int) -> str:
    recorded = RecordedMetrics(gathers=True)
    recorded.add("clash", 1.0, "sum" if rank else "max")
    try:
        recorded.take(build_parallel_context(AxisSizes()).world)
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.slow
def test_another_reduction_on_another_rank_is_an_error_on_all() -> None:
    words = "record('clash'): recorded with reduce='max' and with 'sum'; use one for a name"
    assert run_ranks(2, clash_on_rank) == [words, words]


def record_on_rank(rank: int, world: int) -> list[tuple[float, float, float, bool]]:
    records = Records(float(rank))
    Trainer(tiny("train.train_iters=4", "train.callbacks=['host_memory']"), callbacks=[records]).train()
    return [(line["steps"], line["value"], line["largest"], line["host_memory_gb"] > 0.05) for line in records.lines]


@pytest.mark.dist
@pytest.mark.slow  # two ranks that train four steps: 2 s
def test_values_are_reduced_over_steps_and_ranks() -> None:
    """A line after the first step and after every second one: steps 1, 2 and 4; of ranks 0 and 1."""
    expected = [(2.0, 0.5, 1.0, True), (2.0, 0.5, 1.0, True), (4.0, 0.5, 1.0, True)]
    assert run_ranks(2, record_on_rank) == [expected, expected]


def test_values_are_in_the_metrics_file(tmp_path: Path) -> None:
    Trainer(tiny("train.train_iters=2"), run_dir=tmp_path, callbacks=[Records(3.0)]).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["value"] for line in lines if "value" in line] == [3.0, 3.0]


class FixedEvaluation(Callback):
    """Feeds an early stop with losses in place of the model's."""

    def __init__(self, stop: EarlyStop, losses: list[float]) -> None:
        self.stop, self.losses = stop, losses

    def on_step_end(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.stop.on_evaluation(run, {"valid_loss": self.losses[int(metrics["iteration"]) - 1]})


def test_an_early_stop_continues_its_count_after_a_resume(tmp_path: Path) -> None:
    losses = [3.0, 2.0, 2.0, 2.1, 1.95, 2.0, 2.0, 2.0, 2.0, 2.0]

    def run(folder: str, *overrides: str) -> tuple[int, str | None]:
        stop = EarlyStop("valid_loss", 3, 0.1)
        config = tiny("train.train_iters=10", "checkpoint.save_interval=3", *overrides)
        trainer = Trainer(config, run_dir=tmp_path / folder, callbacks=[stop, FixedEvaluation(stop, losses)])
        result = trainer.train()
        return result.state.iteration, result.stopped

    # By hand: the best is 2.0 of step 2; 1.95 is less than 0.1 better. Three in vain are steps 3, 4 and 5.
    at_once = run("whole")
    assert at_once == (5, "valid_loss has not improved in 3 evaluations (train.early_stop_patience)")
    assert run("cut", "train.exit_iteration=3")[0] == 3
    assert run("cut") == at_once
    assert run("cut") == at_once, "started again it stays where it is"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("train.early_stop_metric=valid_lss",), 'train.early_stop_metric="valid_lss": evaluations have valid_loss'),
        (("train.early_stop_metric=held_perplexity",), "evaluations have valid_loss"),
        (("train.eval_interval=null",), "train.eval_interval is null"),
    ],
)
def test_what_an_early_stop_cannot_follow_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Trainer(tiny("train.train_iters=2", "train.early_stop_patience=1", *overrides)).train()
    assert words in str(refused.value)


def test_an_early_stop_by_the_configuration(tmp_path: Path) -> None:
    """With a learning rate of 0 nothing improves: the first evaluation is the best, and two more end the run."""
    keys = (
        "train.early_stop_patience=2",
        "train.eval_interval=2",
        "train.eval_iters=1",
        "optimizer.lr=0.0",
        "optimizer.min_lr=0.0",
    )
    result = Trainer(tiny("train.train_iters=20", *keys), run_dir=tmp_path).train()
    assert result.state.iteration == 6
    assert "valid_loss has not improved in 2 evaluations" in str(result.stopped)
