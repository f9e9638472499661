"""Lines about steps and evaluations, for the console and log.txt (logging.log_format)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

from mt_core.config.schema import LoggingConfig
from mt_core.train.callbacks import Metrics

# -- Megatron-LM's format (logging.log_format=megatron) ----------------------------------------------

LARGEST_EXPONENT = 20.0
"""Megatron's limit on a loss whose perplexity is printed."""


def megatron_step_line(metrics: Metrics, last_iteration: int) -> str:
    """Line of a step as Megatron-LM 0.19 prints it: fields between ` | `, in its order and with its widths, each
    optional one only where its value is known."""
    fields = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {metrics['iteration']:8d}/{last_iteration:8d}",
        f"consumed samples: {metrics['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {1000 * float(metrics['iteration_time']):.1f}",
        *([f"throughput per GPU (TFLOP/s/GPU): {metrics['tflops']:.1f}"] if "tflops" in metrics else []),
        f"learning rate: {metrics['learning_rate']:.6E}",
        f"global batch size: {metrics['global_batch_size']:5d}",
        *([] if math.isnan(float(metrics["loss"])) else [f"lm loss: {metrics['loss']:.6E}"]),
        f"loss scale: {metrics['loss_scale']:.1f}",
        f"grad norm: {metrics['grad_norm']:.3f}",
        *([f"num zeros: {metrics['zeros_in_grad']}"] if "zeros_in_grad" in metrics else []),
        *([f"params norm: {metrics['params_norm']:.3f}"] if "params_norm" in metrics else []),
        f"number of skipped iterations: {metrics['skipped_since_log']:3d}",
        f"number of nan iterations: {0:3d}",  # a loss that is not finite ends training, or is one of the skipped
    ]
    return " | ".join(fields) + " |"


def megatron_evaluation_lines(metrics: Metrics) -> str:
    """Three lines: losses, perplexities and metrics of all validation sets between two rules."""
    line = f" validation loss at iteration {metrics['iteration']} | "
    for key, value in metrics.items():
        if key.endswith("_loss"):
            name = loss_name(key)
            line += f"{name} value: {value:.6E} | {name} PPL: {perplexity(float(value)):.6E} | "
        elif key != "iteration":
            line += f"{key} value: {value:.6E} | "
    # Megatron prints as many characters as the line has, and one more.
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def loss_name(name: str) -> str:
    """The loss of a validation set: "lm loss" of the only one, "lm loss NAME" of one of several."""
    of_set = name.removesuffix("_loss")
    return "lm loss" if of_set == "valid" else f"lm loss {of_set}"


def perplexity(loss: float) -> float:
    return math.exp(min(LARGEST_EXPONENT, loss))


class LogLines(NamedTuple):
    """step: (metrics of on_log, last iteration) -> its line. evaluation: metrics -> its lines. Both with the time."""

    step: Callable[[Metrics, int], str]
    evaluation: Callable[[Metrics], str]


def log_lines(config: LoggingConfig) -> LogLines:
    """Those of logging.log_format."""
    if config.log_format == "megatron":
        return LogLines(megatron_step_line, megatron_evaluation_lines)
    return LogLines(
        lambda metrics, last: stamped(step_line(metrics, last)), lambda metrics: stamped(evaluation_line(metrics))
    )


def stamped(text: str) -> str:
    """With the local time in front."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"


def step_line(metrics: Metrics, last_iteration: int) -> str:
    """One line about a step: `step 20/300 | loss 3.4652 | grad norm 0.950 | lr 2.90e-03 | 731.4 ms | 11,200 tokens/s |
    395.1 TFLOP/s | MFU 39.9%`, the last two where they are known, of one device. There is no loss where all steps since
    the last line were skipped."""
    parts = [
        f"step {metrics['iteration']}/{last_iteration}",
        *([] if math.isnan(float(metrics["loss"])) else [f"loss {metrics['loss']:.4f}"]),
        f"grad norm {metrics['grad_norm']:.3f}",
        f"lr {metrics['learning_rate']:.2e}",
        f"{1000 * float(metrics['iteration_time']):.1f} ms",
        speed(metrics),
    ]
    if "tflops" in metrics:
        parts.append(f"{metrics['tflops']:.3g} TFLOP/s")
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if metrics["skipped_iterations"]:
        parts.append(f"loss scale {metrics['loss_scale']:g}, {metrics['skipped_iterations']} skipped")
    if int(metrics["iteration"]) < last_iteration:
        seconds = (last_iteration - int(metrics["iteration"])) * float(metrics["iteration_time"])
        parts.append(f"{timedelta(seconds=round(seconds))} left")
    return " | ".join(parts)


def speed(metrics: Metrics) -> str:
    """ "11,200 tokens/s"; of losses that count whole samples "46 samples/s"."""
    unit = "tokens" if "tokens_per_second" in metrics else "samples"
    return f"{metrics[f'{unit}_per_second']:,.0f} {unit}/s"


def evaluation_line(metrics: Metrics) -> str:
    values = [f"{worded(name)} {value:.4f}" for name, value in metrics.items() if name != "iteration"]
    return f"step {metrics['iteration']} | {' | '.join(values)}"


def worded(name: str) -> str:
    """Name of a value of an evaluation in words: `matched_accuracy` as "matched accuracy"."""
    return name.replace("_", " ")
