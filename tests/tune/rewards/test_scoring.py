"""Reward functions: results by hand, failures with the sample named, the same in this process and in others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from mt_core.plugins import load_plugins
from mt_tune.rewards.base import RewardError, RewardSample
from mt_tune.rewards.build import build_rewards
from mt_tune.rewards.config import RewardsConfig

SAMPLES = [
    RewardSample("one", "a", [1], [5], {"answer": "a"}),
    RewardSample("two", "bb", [1, 2], [6, 7], {"answer": "x"}),
    RewardSample("three", "ccc", [3], [8, 9, 10], {"answer": "ccc", "level": 2}),
]


def functions_of(**functions: Callable[..., Any]) -> Any:
    return build_rewards(RewardsConfig(workers=0), load_plugins(), functions)


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_table_has_values_totals_and_metrics() -> None:
    def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float | None]:
        return [None if given == "x" else float(text == given) for text, given in zip(completions, answer, strict=True)]

    table = functions_of(length=length, right=right).score(SAMPLES, 0)
    assert table.values == {"length": [1.0, 2.0, 3.0], "right": [1.0, None, 1.0]}
    assert table.totals([0.5, 2.0]) == [2.5, 1.0, 3.5]
    assert table.totals() == [2.0, 2.0, 4.0]
    assert table.metrics == {
        "rewards/length/mean": 2.0,
        "rewards/length/std": 1.0,
        "rewards/right/mean": 1.0,
        "rewards/right/std": 0.0,
    }


def test_a_sample_that_no_function_judges_has_no_total() -> None:
    table = functions_of(none=lambda completions, **kwargs: [None] * len(completions)).score(SAMPLES, 0)
    assert all(map(math.isnan, table.totals()))


def test_functions_get_what_trl_gives_them() -> None:
    seen: dict[str, Any] = {}

    def look(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        kwargs["log_metric"]("seen", 3.0)
        kwargs["log_extra"]("column", ["p", "q", "r"])
        return [0.0] * 3

    table = functions_of(look=look).score(SAMPLES, 7, max_steps=9)
    assert seen["prompts"] == ["one", "two", "three"]
    assert seen["completions"] == ["a", "bb", "ccc"]
    assert seen["completion_ids"] == [[5], [6, 7], [8, 9, 10]]
    assert seen["answer"] == ["a", "x", "ccc"]
    assert seen["level"] == [None, None, 2]
    assert (seen["trainer_state"].global_step, seen["trainer_state"].max_steps) == (7, 9)
    assert (table.logged, table.columns) == ({"seen": 3.0}, {"column": ["p", "q", "r"]})


def test_async_functions_wait_at_the_same_time() -> None:
    order: list[str] = []

    def waiting(name: str, barrier: list[Any]) -> Callable[..., Any]:
        async def judge(completions: list[str], **kwargs: Any) -> list[float]:
            barrier.append(name)
            while len(barrier) < 2:
                await asyncio.sleep(0)
            order.append(name)
            return [1.0] * len(completions)

        return judge

    barrier: list[Any] = []
    table = functions_of(first=waiting("first", barrier), second=waiting("second", barrier)).score(SAMPLES, 0)
    assert sorted(order) == ["first", "second"]
    assert table.values == {"first": [1.0] * 3, "second": [1.0] * 3}


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ([1.0, 2.0], "returned 2 rewards for 3 samples"),
        (1.0, "returned float; a list"),
        ([1.0, math.nan, 2.0], "sample 1 (prompt 'two'): returned nan"),
        ([1.0, 2.0, math.inf], "sample 2 (prompt 'three'): returned inf"),
        ([1.0, "2", 0.0], "sample 1 (prompt 'two'): returned '2'"),
    ],
)
def test_what_is_no_list_of_rewards_is_refused(returned: Any, reason: str) -> None:
    with pytest.raises(RewardError) as raised:
        functions_of(f=lambda **kwargs: returned).score(SAMPLES, 0)
    assert 'reward "f"' in str(raised.value)
    assert reason in str(raised.value)


def test_the_sample_that_raises_is_named() -> None:
    def fails(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0 / (len(text) - 2) for text in completions]

    with pytest.raises(
        RewardError, match=r'reward "f", sample 1 \(prompt \'two\'\): raised ZeroDivisionError'
    ) as raised:
        functions_of(f=fails).score(SAMPLES, 0)
    assert (raised.value.function, raised.value.sample) == ("f", 1)
