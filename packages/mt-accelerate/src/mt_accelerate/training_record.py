"""Event files of what the engine computes: `MegatronLMPlugin(tensorboard_dir=...)`."""

from __future__ import annotations

import time

from mt_core.train import Engine, StepRecord
from mt_core.train.reporting.step_metrics import StepMetrics
from mt_core.train.step.optimizer_step import StepOutcome
from mt_core.train.trackers.tracker import MetricWriter, TrackedRun, evaluation_values, log_values, step_values


class TrainingRecord:
    """The metrics of steps and evaluations, under Megatron's names. with_speed: times, throughput and memory, too."""

    def __init__(self, engine: Engine, *, with_speed: bool) -> None:
        self._engine, self._with_speed = engine, with_speed
        self._metrics = StepMetrics(engine)
        self._writer = _open(engine) if engine.ctx.is_writer else None

    def add_step(self, record: StepRecord, outcome: StepOutcome) -> None:
        """Collective over pipeline stages."""
        # On every rank: the metrics are collected from the pipeline stages, also where nothing is written.
        metrics = self._metrics.of_step(record, outcome, time.perf_counter())
        line = self._metrics.line_of_log(metrics)
        if self._writer is None or record.iteration % self._engine.config.logging.tensorboard_log_interval:
            return
        speed = log_values(line) if self._with_speed and line is not None else {}
        self._writer.write({**step_values(metrics), **speed}, record.iteration, record.consumed_samples)

    def add_evaluation(self, loss: float) -> None:
        state = self._engine.state
        if self._writer is not None:
            self._writer.write(
                evaluation_values({"valid_loss": loss}, in_nats_per_token=True), state.iteration, state.consumed_samples
            )

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(finished=True)


def _open(engine: Engine) -> MetricWriter:
    tracker = engine.host.callbacks.get("tensorboard", key="MegatronLMPlugin(tensorboard_dir)").build.load()
    run = TrackedRun(engine.config.logging, engine.config.to_dict(), None, engine.state.iteration, None)
    writer: MetricWriter = tracker(engine.config).open_writer(run)
    return writer
