"""Lines about steps and evaluations in the form in which Megatron-LM prints them (logging.log_format=megatron)."""

from __future__ import annotations

import math
from datetime import datetime

from mt_core.train.callbacks import Metrics

LARGEST_EXPONENT = 20.0
"""Megatron's limit on a loss whose perplexity is printed."""


def megatron_step_line(metrics: Metrics, last_iteration: int) -> str:
    """As Megatron-LM 0.19 prints it: fields between ` | `, in its order and with its widths, each optional one only
    where its value is known."""
    fields = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {metrics['iteration']:8d}/{last_iteration:8d}",
        f"consumed samples: {metrics['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {1000 * float(metrics['iteration_time']):.1f}",
        *([f"throughput per GPU (TFLOP/s/GPU): {metrics['tflops']:.1f}"] if "tflops" in metrics else []),
        f"learning rate: {metrics['learning_rate']:.6E}",
        f"global batch size: {metrics['global_batch_size']:5d}",
        f"lm loss: {metrics['loss']:.6E}",
        f"loss scale: {metrics['loss_scale']:.1f}",
        f"grad norm: {metrics['grad_norm']:.3f}",
        *([f"num zeros: {metrics['zeros_in_grad']}"] if "zeros_in_grad" in metrics else []),
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
