"""Metrics of a step for callbacks, and their means since the last line of the log."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from mt_core.config.schema import LoggingConfig
from mt_core.data.building import counts_tokens
from mt_core.nn.auxiliary import ReportsMetrics
from mt_core.train.checkpoint.state import merged_over_stages
from mt_core.train.engine import Engine, StepRecord
from mt_core.train.step.optimizer_step import StepOutcome

# -- peak rates of known GPUs, for MFU ---------------------------------------------------------------

DENSE_BF16_TFLOPS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("B200", 2250.0),
    ("GB200", 2500.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("MI300X", 1307.4),
)
"""(words of the device's name, TFLOP/s), as vendors state them, without sparsity. The first that matches counts."""


def peak_tflops(device: torch.device, config: LoggingConfig) -> float | None:
    """TFLOP/s of the device in bf16, whatever the run's dtype is; None for one that is not known."""
    if config.device_peak_tflops is not None:
        return config.device_peak_tflops
    return peak_of_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of_name(name: str) -> float | None:
    """name: as torch.cuda.get_device_name has it, such as "NVIDIA A100-SXM4-80GB"."""
    # Whole words, as "H20" is a part of "H200" and "A10" of "A100".
    words = set(re.findall(r"\w+", name))
    return next((peak for known, peak in DENSE_BF16_TFLOPS if words.issuperset(known.split())), None)


def unknown_peak(name: str) -> str:
    """Why there is no MFU on a device of this name."""
    return f"the dense bf16 peak of {name} is not known; logging.device_peak_tflops states it"


MetricValues = dict[str, float | int]


@dataclass
class LogWindow:
    """Totals of the steps since the last line of the log. started: by perf_counter, moved by pauses."""

    loss: float = 0.0
    updates: int = 0
    steps: int = 0
    samples: int = 0
    tokens: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def add(self, outcome: StepOutcome, samples: int) -> None:
        if outcome.updated:
            self.loss += outcome.loss
            self.updates += 1
        self.steps += 1
        self.samples += samples
        self.tokens += outcome.tokens

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


class StepMetrics:
    """Computes the metrics of an engine's steps. One object per call of `Trainer.train`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._peak = peak_tflops(engine.device, engine.config.logging)
        self._counts_tokens = counts_tokens(engine.config, engine.host)
        self._window = LogWindow()

    def of_step(self, record: StepRecord, outcome: StepOutcome, ended: float) -> MetricValues:
        """ended: end of the step, by perf_counter."""
        self._window.add(outcome, record.num_samples)
        seconds = ended - record.started
        metrics = {
            "iteration": record.iteration,
            "consumed_samples": record.consumed_samples,
            "global_batch_size": record.num_samples,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": record.learning_rate,
            "loss_scale": self.engine.scaler.scale,
            "skipped_iterations": self.engine.state.skipped_iterations,
            "iteration_time": seconds,
            **self._speed(outcome.tokens, record.num_samples, seconds),
            **outcome.auxiliary,
        }
        if outcome.zeros_in_grad is not None:
            metrics["zeros_in_grad"] = outcome.zeros_in_grad
        return metrics

    def line_of_log(self, metrics: MetricValues, last_iteration: int | None = None) -> MetricValues | None:
        """Every logging.log_interval steps, and after the first and the last one: metrics of the step, loss and speed
        averaged since the last line, and the metrics of layers. Collective."""
        exit_iteration = self.engine.config.train.exit_iteration
        ends = metrics["iteration"] in (1, last_iteration, exit_iteration)
        if metrics["iteration"] % self.engine.config.logging.log_interval and not ends:
            return None
        means, self._window = self._means(self._window), LogWindow()
        of_layers = self._reported_by_layers()
        return {**metrics, **means, **_memory(self.engine.device), **self._params_norm(), **of_layers}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time of the block is no time of steps."""
        began = time.perf_counter()
        yield
        # Evaluation and checkpoints inside the window are left out of its duration.
        self._window.started += time.perf_counter() - began

    def _means(self, window: LogWindow) -> MetricValues:
        seconds = window.seconds
        return {
            # Skipped steps have no loss to average, and 0 would be one.
            "loss": window.loss / window.updates if window.updates else math.nan,
            "skipped_since_log": window.steps - window.updates,
            "iteration_time": seconds / window.steps,
            **self._speed(window.tokens, window.samples, seconds),
            **self._throughput(window.samples / seconds),
        }

    def _speed(self, tokens: float, samples: int, seconds: float) -> MetricValues:
        """Throughput in tokens, or in samples where the loss is per sample and its mask does not count tokens."""
        if self._counts_tokens:
            return {"tokens_per_second": tokens / seconds}
        return {"samples_per_second": samples / seconds}

    def _throughput(self, samples_per_second: float) -> MetricValues:
        """tflops: of one device, recomputation not counted. mfu: its fraction of the peak."""
        if self.engine.flops_per_sample is None:
            return {}
        # samples_per_second is of all ranks.
        tflops = self.engine.flops_per_sample * samples_per_second / self.engine.ctx.world.size / 1e12
        return {"tflops": tflops, **({"mfu": tflops / self._peak} if self._peak is not None else {})}

    def _params_norm(self) -> MetricValues:
        """With logging.log_params_norm: of the weights after the step's update."""
        if not self.engine.config.logging.log_params_norm:
            return {}
        norm = self.engine.step.sums.params_norm(self.engine.weights.named_parameters())
        return {"params_norm": float(norm)}

    def _reported_by_layers(self) -> MetricValues:
        of_stage = {
            name: value
            for module in self.engine.model.modules()
            if isinstance(module, ReportsMetrics)
            for name, value in module.metrics().items()
        }
        return dict(merged_over_stages(of_stage, self.engine.ctx))


def _memory(device: torch.device) -> MetricValues:
    """Bytes of this process on its GPU: what torch holds, what tensors take, and the most that they took."""
    if device.type != "cuda":
        return {}
    return {
        "memory_reserved": torch.cuda.memory_reserved(device),
        "memory_allocated": torch.cuda.memory_allocated(device),
        "max_memory_allocated": torch.cuda.max_memory_allocated(device),
    }
