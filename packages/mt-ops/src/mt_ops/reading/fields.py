"""What readers of text logs share: numbers as people write them, times, and names of metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)", re.IGNORECASE)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d+))?")

MEGATRON_NAMES: Mapping[str, str] = {
    "lm loss": "loss",
    "learning rate": "learning_rate",
    "learning-rate": "learning_rate",
    "global batch size": "global_batch_size",
    "batch-size": "global_batch_size",
    "batch size": "global_batch_size",
    "grad norm": "grad_norm",
    "grad-norm": "grad_norm",
    "loss scale": "loss_scale",
    "loss-scale": "loss_scale",
    "num zeros": "zeros_in_grad",
    "num-zeros": "zeros_in_grad",
    "params norm": "params_norm",
    "params-norm": "params_norm",
    "consumed samples": "consumed_samples",
    "consumed-samples": "consumed_samples",
    "throughput per gpu (tflop/s/gpu)": "tflops",
    "throughput": "tflops",
    "iteration-time": "iteration_time",
    "tokens-per-second": "tokens_per_second",
    "samples-per-second": "samples_per_second",
    "skipped-iterations": "skipped_iterations",
    "number of skipped iterations": "skipped_since_log",
    "number of nan iterations": "nan_since_log",
    "mem-reserved-bytes": "memory_reserved",
    "mem-allocated-bytes": "memory_allocated",
    "mem-max-allocated-bytes": "max_memory_allocated",
    "lm loss validation": "valid_loss",
}
"""Names of Megatron-LM's log lines and event files, in lower case, to mt's."""


def number(text: str) -> float | None:
    """The first number of the text, thousands separated by commas allowed."""
    match = NUMBER.search(text)
    return float(match.group().replace(",", "")) if match else None


def seconds_since_epoch(text: str) -> float | None:
    """Time of the first date and time in the text, taken as local time."""
    match = CLOCK.search(text)
    if match is None:
        return None
    day, clock, fraction = match.groups()
    moment = datetime.fromisoformat(f"{day} {clock}").timestamp()
    return moment + (float(f"0.{fraction}") if fraction else 0.0)


def mt_name(name: str) -> str:
    """mt's name of a metric that Megatron-LM writes as `name`; others with underscores in place of spaces."""
    plain = name.strip().lower()
    return MEGATRON_NAMES.get(plain, re.sub(r"[\s-]+", "_", plain))
