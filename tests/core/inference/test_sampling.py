"""Choosing ids: the sets that top-k and top-p keep, found by hand and by a loop, and the frequencies drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mt_core.errors import ConfigError
from mt_core.inference.sampling import SamplingOptions, keep_top_k, keep_top_p, sample

PROBABILITIES = [0.5, 0.25, 0.15, 0.1]
LOGITS = torch.tensor([PROBABILITIES]).log()


def kept(logits: torch.Tensor) -> list[int]:
    return torch.isfinite(logits[0]).nonzero().flatten().tolist()


@pytest.mark.parametrize(("k", "ids"), [(1, [0]), (3, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_top_k_keeps_the_k_likeliest(k, ids) -> None:
    assert kept(keep_top_k(LOGITS, k)) == ids


@pytest.mark.parametrize(("p", "ids"), [(0.4, [0]), (0.6, [0, 1]), (0.8, [0, 1, 2]), (0.95, [0, 1, 2, 3])])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, ids) -> None:
    assert kept(keep_top_p(LOGITS, p)) == ids


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8, unique=True), st.floats(0.01, 0.99))
def test_top_p_against_a_loop(weights, p) -> None:
    total = sum(weights)
    chosen, reached = [], 0.0
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        if abs(reached - p) < 1e-5:
            return  # on the edge rounding decides
        if reached >= p:
            break
        chosen.append(index)
        reached += weights[index] / total
    logits = torch.tensor([weights], dtype=torch.float64).log()
    assert kept(keep_top_p(logits, p)) == sorted(chosen)


def frequencies(options: SamplingOptions, draws: int = 20_000) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    ids = sample(LOGITS.expand(draws, -1), options, generator)
    return (torch.bincount(ids, minlength=4) / draws).tolist()


def test_ids_are_drawn_with_their_probabilities() -> None:
    assert frequencies(SamplingOptions()) == pytest.approx(PROBABILITIES, abs=0.015)


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    """At temperature t the probabilities are p^(1/t), normalized."""
    for temperature in (0.5, 2.0):
        powers = [p ** (1 / temperature) for p in PROBABILITIES]
        expected = [power / sum(powers) for power in powers]
        assert frequencies(SamplingOptions(temperature=temperature)) == pytest.approx(expected, abs=0.015)


def test_what_is_left_out_is_never_drawn_and_the_rest_keeps_its_proportions() -> None:
    assert frequencies(SamplingOptions(top_k=2)) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.015)
    assert frequencies(SamplingOptions(top_p=0.6)) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.015)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert sample(torch.tensor([[0.1, 3.0, 2.0]]), SamplingOptions(temperature=0), None).tolist() == [1]


@pytest.mark.parametrize("options", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_impossible_options_are_refused(options) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SamplingOptions(**options)
