"""What a run's numbers say is wrong with it: which faults are named, and that a healthy run has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_ops.reading.run import Run, Series
from mt_ops.report.findings import findings, growth, slowest

STEPS = np.arange(1, 101)
NOISE = np.random.default_rng(0).normal(size=100)


def run_with(**series: Any) -> Run:
    found = {name.replace("__", "/"): Series(STEPS, np.asarray(values, float)) for name, values in series.items()}
    return Run("r", Path("r"), "mt", series=found)


def test_memory_that_grows_steadily_is_named_with_its_rate() -> None:
    """4 MiB a step behind a first half in which the run allocates 1 GiB."""
    start = np.minimum(STEPS, 50) * 0.02
    (text,) = findings(run_with(host_memory_gb=2 + start + STEPS * 4 / 1024))
    assert text.startswith("host memory grows by 4 MiB a step: 3.39 GiB at step 100")


@pytest.mark.parametrize(
    "values", [np.full(100, 10.0), 10 + np.minimum(STEPS, 40) * 0.2, 10 + 0.2 * NOISE, 10 + 1e-5 * STEPS]
)
def test_memory_that_is_level_or_noisy_is_not(values: Any) -> None:
    assert growth(Series(STEPS, values)) is None


def test_layers_with_dead_experts_are_named_the_worst_first() -> None:
    dead = {"moe__layer_0__dead_experts": [0] * 95 + [2] * 5, "moe__layer_1__dead_experts": [1] * 100}
    dead["moe__layer_2__dead_experts"] = [0] * 80 + [6] * 20
    (text,) = findings(run_with(**dead))
    assert text.startswith("experts without a token: layer 2 6, layer 1 1 (mean of")


def ranks(*waited: float) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "parts": {"start": 50.0, "communication": seconds, "forward": 10.0 - seconds}}
        for rank, seconds in enumerate(waited)
    ]


def test_a_rank_is_slow_where_others_clearly_wait_for_it() -> None:
    assert (slowest(ranks(4.0, 0.5, 4.0)) or {})["rank"] == 1
    assert slowest(ranks(1.0, 0.5, 1.2)) is None
    assert slowest(ranks(4.0)) is None
