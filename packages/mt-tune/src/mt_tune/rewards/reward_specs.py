"""Rewards that plugins register by `mt_register_rewards`; the section [rewards] selects them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mt_core.kinds import Kind, Lazy, Spec

RewardFunction = Callable[..., Any]
"""A function with the signature of TRL's reward functions, which may be async. It takes those that it needs of prompts,
completions (texts, or lists of messages), completion_ids, trainer_state, log_extra, log_metric and the columns of the
rows under their names, as keyword arguments, and the others as `**kwargs`; all but trainer_state and the two loggers
are lists with one entry for each sample. Returns a list of numbers, None for samples that it does not judge."""


class BuildReward(Protocol):
    def __call__(self, options: Mapping[str, Any]) -> RewardFunction:
        """options: rewards.options of the function. Raises ConfigError for unknown or missing ones."""
        ...


@dataclass(frozen=True, kw_only=True)
class RewardSpec(Spec):
    """A reward of generated texts, selected by `rewards.functions`. Its module imports nothing heavy that it does not
    need: each worker process imports it."""

    build: Lazy[BuildReward]
    one_at_a_time: bool = True
    """Whether each sample is judged by itself: samples are divided among processes."""
    in_process: bool = False
    """Whether it is called in the process of training, such as a model on its device: nothing ends it."""


REWARDS = Kind("rewards", "a reward", RewardSpec, "mt-tune")
