"""Advantages worked out by hand, and by the formulas of the papers in plain NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mt_tune.rl.advantages import ADVANTAGE_FUNCTIONS, Scored, has_equal_rewards, overlong_penalty

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 5.0]])
LENGTHS = np.array([[2, 1, 3, 1], [1, 1, 2, 1]])


def advantages(name: str, rewards: np.ndarray = REWARDS, penalty: float = 0.0) -> list[list[float]]:
    penalties = [np.full(length, penalty) for length in LENGTHS.ravel()]
    return [part.tolist() for part in ADVANTAGE_FUNCTIONS[name](Scored(rewards, LENGTHS * 1.0, penalties))]


# Deviations: of 1 0 0 1 it is sqrt(1/3); of 2 2 2 5, with mean 2.75, it is 1.5.
A, B = 0.5 / (math.sqrt(1 / 3) + 1e-4), 1 / (1.5 + 1e-4)
BY_HAND = {
    "grpo": [A, -A, -A, A, -0.75 * B, -0.75 * B, -0.75 * B, 2.25 * B],
    "dr_grpo": [0.5, -0.5, -0.5, 0.5, -0.75, -0.75, -0.75, 2.25],
    # The mean of the others of 1 0 0 1 is 1/3 and 2/3, of 2 2 2 5 it is 3 and 2.
    "rloo": [2 / 3, -2 / 3, -2 / 3, 2 / 3, -1, -1, -1, 3],
    # Means by length: (2 + 0 + 0 + 1) / 7 and (2 + 2 + 4 + 5) / 5.
    "opo": [1 - 3 / 7, -3 / 7, -3 / 7, 1 - 3 / 7, 2 - 2.6, 2 - 2.6, 2 - 2.6, 5 - 2.6],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_of_a_completion(name: str) -> None:
    found = advantages(name)
    assert [len(part) for part in found] == LENGTHS.ravel().tolist()
    assert all(len(set(part)) == 1 for part in found)
    assert [part[0] for part in found] == pytest.approx(BY_HAND[name], rel=1e-12)


def test_the_deviation_of_the_batch_is_that_of_all_rewards() -> None:
    scale = REWARDS.std(ddof=1) + 1e-4
    expected = [value / scale for value in BY_HAND["dr_grpo"]]
    assert [part[0] for part in advantages("grpo_batch")] == pytest.approx(expected)


def test_tokens_are_whitened_over_the_batch_after_their_penalties() -> None:
    """REINFORCE++: the return of a token has the penalties of itself and of those behind it."""
    returns = [
        np.array([reward - 0.5 * (length - place) for place in range(length)])
        for reward, length in zip(REWARDS.ravel(), LENGTHS.ravel(), strict=True)
    ]
    tokens = np.concatenate(returns)
    expected = [((part - tokens.mean()) / math.sqrt(tokens.var(ddof=1) + 1e-8)).tolist() for part in returns]
    found = advantages("reinforce_plus_plus", penalty=0.5)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_a_baseline_is_subtracted_before_whitening() -> None:
    tokens = np.repeat(np.array(BY_HAND["dr_grpo"]), LENGTHS.ravel())
    expected = (np.array(BY_HAND["dr_grpo"]) - tokens.mean()) / math.sqrt(tokens.var(ddof=1) + 1e-8)
    assert [part[0] for part in advantages("reinforce_plus_plus_baseline")] == pytest.approx(expected.tolist())


def test_penalties_of_a_completion_are_part_of_its_reward() -> None:
    lower = REWARDS - 0.5 * LENGTHS
    assert advantages("rloo", penalty=0.5) == advantages("rloo", lower)


@pytest.mark.parametrize("name", ADVANTAGE_FUNCTIONS)
def test_a_completion_without_a_reward_is_as_if_it_were_not_there(name: str) -> None:
    judged = np.array([[1.0, 0.0, np.nan, 0.5], [np.nan] * 4])
    found = advantages(name, judged)
    assert set(found[2]) == {0.0}
    assert all(set(part) == {0.0} for part in found[4:])
    penalties = [np.zeros(length) for length in (2, 1, 1)]
    rest = Scored(np.array([[1.0, 0.0, 0.5]]), np.array([[2.0, 1.0, 1.0]]), penalties)
    expected = [part.tolist() for part in ADVANTAGE_FUNCTIONS[name](rest)]
    for one, other in zip((found[0], found[1], found[3]), expected, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_groups_with_equal_rewards() -> None:
    rewards = np.array([[0.1 + 0.2, 0.3], [0.0, 1.0], [np.nan, 1.0], [np.nan, np.nan]])
    assert has_equal_rewards(rewards).tolist() == [True, False, True, True]


def test_the_penalty_of_long_completions_falls_to_its_whole_at_the_longest() -> None:
    found = [overlong_penalty(length, 20, 4, 1.0) for length in (0, 16, 17, 18, 20, 30)]
    assert found == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(20, 20, 0, 1.0) == 0.0
