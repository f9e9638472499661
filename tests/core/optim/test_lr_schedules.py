"""Learning rates against the formulas written out, and against what Megatron itself used."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_core.config.schema import LRScheduleConfig
from mt_core.optim.configs import WSDScheduleConfig
from mt_core.optim.schedules import (
    Horizon,
    build_constant,
    build_cosine,
    build_inverse_square_root,
    build_linear,
    build_wsd,
)

BATCH = 4
HORIZON = Horizon(total_samples=100 * BATCH, global_batch_size=BATCH, max_lr=1.0, min_lr=0.1)


def at(builder, config, iteration, horizon=HORIZON):
    return builder(config, horizon)(iteration * BATCH)


def test_warmup_is_a_line_from_init_to_max() -> None:
    config = LRScheduleConfig(lr_warmup_iters=10, lr_warmup_init=0.2)
    assert at(build_linear, config, 0) == 0.2
    assert at(build_linear, config, 5) == pytest.approx(0.6)
    assert at(build_linear, config, 10) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("builder", "iteration", "expected"),
    [
        (build_linear, 55, 0.1 + 0.9 * 0.5),
        (build_cosine, 55, 0.1 + 0.9 * 0.5),
        (build_cosine, 32.5, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))),
        (build_constant, 55, 1.0),
        (build_constant, 1000, 1.0),
        (build_linear, 101, 0.1),
        (build_inverse_square_root, 40, 0.5),
    ],
)
def test_decay_after_ten_steps_of_warmup(builder, iteration, expected) -> None:
    config = LRScheduleConfig(lr_warmup_iters=10)
    assert at(builder, config, iteration) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("style", "coefficient"),
    [
        ("linear", 0.75),
        ("cosine", 0.5 * (1 + math.cos(math.pi / 4))),
        ("minus_sqrt", 0.5),
        ("exponential", 2 * 0.5**0.25 - 1),
    ],
)
def test_wsd_is_flat_and_then_has_its_tail(style, coefficient) -> None:
    config = WSDScheduleConfig(lr_wsd_decay_style=style, lr_wsd_decay_iters=20)
    assert at(build_wsd, config, 79) == 1.0
    assert at(build_wsd, config, 85) == pytest.approx(0.1 + 0.9 * coefficient)
    assert at(build_wsd, config, 100) == pytest.approx(0.1)


@given(st.integers(0, 1000))
def test_it_depends_on_consumed_samples_alone(consumed) -> None:
    """Ramped-up batches stand at the same rate as constant ones after the same number of samples."""
    config = LRScheduleConfig(lr_warmup_samples=40, lr_decay_samples=400)
    other_batch = Horizon(total_samples=777, global_batch_size=64, max_lr=1.0, min_lr=0.1)
    assert build_cosine(config, HORIZON)(consumed) == build_cosine(config, other_batch)(consumed)


def test_warmup_as_a_fraction_of_the_decay() -> None:
    config = LRScheduleConfig(lr_warmup_fraction=0.25)
    assert build_linear(config, HORIZON).span.warmup == 100
    # A decay of 80 samples in a longer training.
    shorter = LRScheduleConfig(lr_warmup_fraction=0.25, lr_decay_samples=80)
    assert build_linear(shorter, HORIZON).span.warmup == 20


@pytest.mark.skipif("MT_GOLDEN" not in os.environ, reason="MT_GOLDEN does not name the folder of golden files")
def test_it_equals_the_rates_that_megatron_used() -> None:
    golden = json.loads((Path(os.environ["MT_GOLDEN"]) / "ckpt/gpt/expected.json").read_text())
    config = LRScheduleConfig(lr_warmup_iters=2, lr_decay_iters=10, lr_warmup_init=1e-4)
    steps = [*golden["steps_0_to_2_before_the_checkpoint"], *golden["steps_3_to_5_resumed_with_optimizer"]]
    max_lr = max(step["lr"] for step in steps)
    schedule = build_cosine(config, Horizon(10 * BATCH, BATCH, max_lr=max_lr, min_lr=1e-4))
    assert [schedule(i * BATCH) for i in range(6)] == pytest.approx([step["lr"] for step in steps], rel=1e-12)
