"""The live line fits on a line of any width, and keeps what matters most."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mt_cli.progress import LiveProgress
from mt_core.config.schema import LoggingConfig
from mt_core.train.reporting.log_lines import log_lines

METRICS = {"loss": 10.8251, "grad_norm": 123.456, "learning_rate": 6e-4, "tokens_per_second": 1_234_567.0}


def line_at(width: int, last: int = 500_000, metrics: dict[str, float] = METRICS) -> str:
    """The line of a long run as a terminal of this width shows it."""
    quiet = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    progress = LiveProgress(quiet, log_lines(LoggingConfig()))
    run: Any = SimpleNamespace(last_iteration=last, state=SimpleNamespace(iteration=123_456))
    progress.on_train_start(run)
    progress.on_step_end(run, metrics)
    progress.close()
    shown = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with shown.capture() as capture:
        shown.print(progress._progress.get_renderable())
    text = capture.get().rstrip("\n")
    assert "\n" not in text, text
    return text


@pytest.mark.parametrize("width", [40, 50, 60, 80, 100, 120, 200])
def test_it_is_one_line_with_step_loss_and_time(width: int) -> None:
    line = line_at(width)
    assert len(line.rstrip()) <= width
    assert "…" not in line
    assert "123456/500000" in line
    assert "loss 10.825" in line
    assert re.search(r"(\d+:\d\d|--:--)\s*$", line)


def test_wider_lines_show_more() -> None:
    of_samples = {name: value for name, value in METRICS.items() if name != "tokens_per_second"}
    assert "tokens/s" not in line_at(40)
    assert "1,234,567 tokens/s" in line_at(60)
    assert "29 samples/s" in line_at(60, metrics={**of_samples, "samples_per_second": 29.0})
    eighty = line_at(80)
    assert "1,234,567 tokens/s" in eighty
    assert "grad norm 123.46" in eighty
    widest = line_at(140)
    assert all(part in widest for part in ("1,234,567 tokens/s", "grad norm 123.46", "lr 6.0e-04", "━"))
