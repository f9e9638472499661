"""A source of batches: what it gives is trained on, validation is completed by it, its state continues a run."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_core.config import load_config
from mt_core.config.loading import LoadedConfig
from mt_core.data.loader import RankBatch
from mt_core.errors import CheckpointError, PluginError
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.plugins import Plugin, PluginHost, load_plugins
from mt_core.specs import BatchSourceSpec, LossSpec
from mt_core.train import Callback, Trainer
from mt_core.train.batch_source import BatchSource, TrainingRun


class Weighing(BatchSource):
    """Multiplies the weights of the n-th batch since the start of the run by n."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self.given, self.closed = 0, False

    def batches(self) -> Generator[RankBatch, None, None]:
        for batch in super().batches():
            self.given += 1
            yield batch

    def complete(self, batch: RankBatch) -> RankBatch:
        factor = np.float32(1 + self.given)
        return replace(
            batch, micro_batches=[{**x, "factor": np.full_like(x["loss_mask"], factor)} for x in batch.micro_batches]
        )

    def state_dict(self) -> Mapping[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]

    def close(self) -> None:
        self.closed = True


class FactorLoss:
    """The factor of the source: a loss of which each value is known. It reports how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Any, batch: Mapping[str, Any]) -> Any:
        self.calls += output.requires_grad
        return batch["factor"] + 0.0 * output.sum(-1)

    def take_recorded(self) -> list[tuple[str, float, str]]:
        calls, self.calls = self.calls, 0
        return [("calls", float(calls), "sum")]


def build_loss(config: Any, parallel: Any) -> FactorLoss:
    return FactorLoss()


class Plugins:
    @staticmethod
    @hookimpl
    def mt_register_batch_sources() -> list[BatchSourceSpec]:
        return [BatchSourceSpec(name="weighing", doc="of a test", build=Lazy(f"{__name__}:Weighing"))]

    @staticmethod
    @hookimpl
    def mt_register_losses() -> list[LossSpec]:
        return [LossSpec(name="factor", doc="of a test", build=Lazy(f"{__name__}:build_loss"))]


def host_of_test() -> PluginHost:
    host = load_plugins()
    host.add(Plugins, Plugin("test", "nowhere", "test-distribution", "1.0"))
    return host


class Lines(Callback):
    def __init__(self) -> None:
        self.losses, self.calls, self.valid = list[float](), list[float](), list[float]()

    def on_step_end(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.losses.append(float(metrics["loss"]))

    def on_log(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.calls.append(float(metrics.get("calls", -1.0)))

    def on_evaluation(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.valid.append(float(metrics["valid_loss"]))


def tiny(host: PluginHost, *overrides: str) -> LoadedConfig:
    small = ("num_layers=1", "hidden_size=16", "num_attention_heads=2", "max_position_embeddings=16")
    common = (
        "data.seq_length=16",
        "data.corpus_bytes=200000",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "logging.log_interval=2",
    )
    keys = [f"model.{key}" for key in small] + list(common) + ["train.sample_prompt=null", "train.eval_iters=1"]
    return load_config(preset="gpt-tiny", overrides=[*keys, "train.loss=factor", *overrides], host=host)


def run(directory: Path, *overrides: str) -> tuple[Trainer, Lines]:
    host, lines = host_of_test(), Lines()
    trainer = Trainer(tiny(host, *overrides), run_dir=directory, host=host, callbacks=[lines])
    trainer.train()
    return trainer, lines


def test_batches_of_a_source_are_trained_on_and_continued(tmp_path: Path) -> None:
    named = ("train.batch_source=weighing", "train.train_iters=4")
    trainer, whole = run(tmp_path / "whole", *named)
    assert whole.losses == [1.0, 2.0, 3.0, 4.0]
    assert whole.valid == [5.0], "validation is completed with the state after the last batch"
    assert whole.calls == [2.0, 2.0, 4.0], "two micro-batches a step; lines after steps 1, 2 and 4"
    assert isinstance(trainer.source, Weighing)
    assert trainer.source.closed
    run(tmp_path / "cut", *named, "train.exit_iteration=2")
    assert run(tmp_path / "cut", *named)[1].losses == [3.0, 4.0]


def test_a_checkpoint_without_the_state_is_refused(tmp_path: Path) -> None:
    usual = ("train.loss=cross_entropy", "train.train_iters=2")
    run(tmp_path, *usual, "train.exit_iteration=1")
    with pytest.raises(CheckpointError, match="train.batch_source: dataset in the checkpoint, weighing now"):
        run(tmp_path, *usual, "train.batch_source=weighing")
    accepted = 'checkpoint.accept_changes=["train.batch_source"]'
    with pytest.raises(CheckpointError, match="has no state of a source of batches"):
        run(tmp_path, *usual, "train.batch_source=weighing", accepted)


def test_an_unknown_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"train.batch_source=wieghing .*did you mean .weighing"):
        run(tmp_path, "train.batch_source=wieghing", "train.train_iters=1")
