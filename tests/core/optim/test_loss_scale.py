"""The dynamic loss scale, step by step, as worked out by hand from the rule."""

from __future__ import annotations

from mt_core.config.schema import PrecisionConfig
from mt_core.optim.loss_scale import build_loss_scaler


def scaler(**keys):
    return build_loss_scaler(PrecisionConfig(dtype="fp16", initial_loss_scale=1024.0, **keys))


def test_it_halves_only_after_as_many_overflows_as_hysteresis() -> None:
    subject = scaler(hysteresis=2)
    subject.update(True)
    assert subject.scale == 1024
    subject.update(True)
    assert subject.scale == 512
    subject.update(True)
    assert subject.scale == 256, "patience comes back only with a full window of clean steps"


def test_it_doubles_after_a_window_without_overflow_and_regains_patience() -> None:
    subject = scaler(hysteresis=2, loss_scale_window=3)
    subject.update(True)
    for _ in range(3):
        subject.update(False)
    assert subject.scale == 2048
    subject.update(True)
    assert subject.scale == 2048


def test_an_overflow_starts_the_window_again() -> None:
    subject = scaler(loss_scale_window=3)
    for overflowed in (False, False, True, False, False):
        subject.update(overflowed)
    assert subject.scale == 1024


def test_it_stops_at_the_minimum_and_says_so() -> None:
    subject = scaler(hysteresis=1, min_loss_scale=512.0)
    assert not subject.exhausted
    subject.update(True)
    subject.update(True)
    assert subject.scale == 512
    assert subject.exhausted


def test_a_constant_scale_never_moves() -> None:
    subject = build_loss_scaler(PrecisionConfig(dtype="fp16", loss_scale=128.0))
    for _ in range(5):
        subject.update(True)
    assert subject.scale == 128


def test_its_state_comes_back() -> None:
    first, second = scaler(loss_scale_window=3), scaler(loss_scale_window=3)
    for overflowed in (False, True, False, False):
        first.update(overflowed)
    second.load_state(first.state())
    for overflowed in (False, True, True):
        first.update(overflowed)
        second.update(overflowed)
    assert first == second


def test_a_resumed_scale_continues_as_the_one_that_was_saved() -> None:
    first, resumed = scaler(hysteresis=3), scaler(hysteresis=3)
    for overflow in (True, False, True):
        first.update(overflow)
    resumed.load_state(first.state())
    for overflow in (True, False, True):
        first.update(overflow)
        resumed.update(overflow)
        assert (resumed.scale, resumed.patience) == (first.scale, first.patience)
    assert resumed.scale < 1024, "the overflows before the checkpoint count"
