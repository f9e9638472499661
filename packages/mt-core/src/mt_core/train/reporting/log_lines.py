"""Lines about steps and evaluations, for the console and log.txt (logging.log_format)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from mt_core.config.schema import LoggingConfig
from mt_core.train.callbacks import Metrics
from mt_core.train.reporting.megatron_log import megatron_evaluation_lines, megatron_step_line


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
    395.1 TFLOP/s | MFU 39.9%`, the last two where they are known, of one device."""
    parts = [
        f"step {metrics['iteration']}/{last_iteration}",
        f"loss {metrics['loss']:.4f}",
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
    """Of a value of an evaluation: `matched_accuracy` as "matched accuracy"."""
    return name.replace("_", " ")
