"""Names of metrics in trackers: those of Megatron-LM, where it has one."""

from __future__ import annotations

from collections.abc import Mapping

from mt_core.train.callbacks import Metrics
from mt_core.train.reporting.megatron_log import loss_name, perplexity

AXES = ("iteration", "consumed_samples")
OF_STEP: Mapping[str, str] = {
    "loss": "lm loss",
    "learning_rate": "learning-rate",
    "grad_norm": "grad-norm",
    "loss_scale": "loss-scale",
    "global_batch_size": "batch-size",
    "zeros_in_grad": "num-zeros",
    "skipped_iterations": "skipped-iterations",
}
OF_LOG: Mapping[str, str] = {
    "iteration_time": "iteration-time",
    "tflops": "throughput",
    "mfu": "mfu",
    "tokens_per_second": "tokens-per-second",
    "samples_per_second": "samples-per-second",
    "memory_reserved": "mem-reserved-bytes",
    "memory_allocated": "mem-allocated-bytes",
    "max_memory_allocated": "mem-max-allocated-bytes",
}
"""Means since the last line of the log, and memory."""
OF_LOG_ONLY = {*OF_LOG, "skipped_since_log"}


def step_values(metrics: Metrics) -> dict[str, float]:
    """Of on_step_end: what a step has, and what layers added to its loss."""
    left_out = {*AXES, *OF_LOG_ONLY}
    return {OF_STEP.get(key, key): float(value) for key, value in metrics.items() if key not in left_out}


def log_values(metrics: Metrics) -> dict[str, float]:
    """Of on_log: speed, memory, and what layers report."""
    left_out = {*AXES, *OF_STEP, "skipped_since_log"}
    return {OF_LOG.get(key, key): float(value) for key, value in metrics.items() if key not in left_out}


def evaluation_values(metrics: Metrics, *, in_nats_per_token: bool) -> dict[str, float]:
    """Values of on_evaluation: loss and metrics of each validation set, and what evaluators measure; of a loss in nats
    per token also its perplexity."""
    values = {}
    for key, value in metrics.items():
        if key.endswith("_loss"):
            name = loss_name(key)
            values[f"{name} validation"] = float(value)
            if in_nats_per_token:
                values[f"{name} validation ppl"] = perplexity(float(value))
        elif key not in AXES:
            values[key.replace("_", " ")] = float(value)
    return values
