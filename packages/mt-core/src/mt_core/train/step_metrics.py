"""Metrics of a step for callbacks, and their means since the last line of the log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mt_core.nn.auxiliary import ReportsMetrics
from mt_core.train.checkpoint.state import merged_over_stages
from mt_core.train.engine import Engine, StepRecord
from mt_core.train.optimizer_step import StepOutcome

MetricValues = dict[str, float | int]


@dataclass
class LogWindow:
    """Totals of the steps since the last line of the log."""

    loss: float = 0.0
    steps: int = 0
    tokens: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def add(self, outcome: StepOutcome) -> None:
        if outcome.updated:
            self.loss += outcome.loss
            self.steps += 1
        self.tokens += outcome.tokens

    def means(self) -> MetricValues:
        seconds = time.perf_counter() - self.started
        return {"loss": self.loss / max(self.steps, 1), "tokens_per_second": self.tokens / seconds}


class StepMetrics:
    """Computes the metrics of an engine's steps. One object per call of `Trainer.train`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._window = LogWindow()

    def of_step(self, record: StepRecord, outcome: StepOutcome, ended: float) -> MetricValues:
        """ended: end of the step, by perf_counter."""
        self._window.add(outcome)
        metrics = {
            "iteration": record.iteration,
            "consumed_samples": record.consumed_samples,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": record.learning_rate,
            "loss_scale": self.engine.scaler.scale,
            "skipped_iterations": self.engine.state.skipped_iterations,
            "tokens_per_second": outcome.tokens / (ended - record.started),
            **outcome.auxiliary,
        }
        if outcome.zeros_in_grad is not None:
            metrics["zeros_in_grad"] = outcome.zeros_in_grad
        return metrics

    def line_of_log(self, metrics: MetricValues) -> MetricValues | None:
        """Every logging.log_interval steps, and after the first one: the metrics of the step, with loss and speed
        averaged since the last line, and the metrics of layers. Collective over pipeline stages."""
        if metrics["iteration"] % self.engine.config.logging.log_interval and metrics["iteration"] != 1:
            return None
        means, self._window = self._window.means(), LogWindow()
        return {**metrics, **means, **self._reported_by_layers()}

    def _reported_by_layers(self) -> MetricValues:
        own = {
            name: value
            for module in self.engine.model.modules()
            if isinstance(module, ReportsMetrics)
            for name, value in module.metrics().items()
        }
        return dict(merged_over_stages(own, self.engine.ctx))
