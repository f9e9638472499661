"""Rewards of completions: what reward functions are given, and what becomes of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mt_core.interfaces import Tokenizer
from mt_tune.rewards.base import RewardSample, RewardTable, mean_and_std
from mt_tune.rewards.scoring import RewardFunctions
from mt_tune.rl.advantages import Values, deviation, has_equal_rewards, overlong_penalty
from mt_tune.rl.config import RLConfig
from mt_tune.rl.prompts import Prompt
from mt_tune.rl.rollout import Group, Rollout

ENVIRONMENT = "environment"
"""Name of an environment's reward in tables and metrics."""


class Judge:
    """Gives rewards to the completions of groups, in one process of the run. ends: ids that end a completion."""

    def __init__(self, functions: RewardFunctions, keys: RLConfig, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self.functions, self.keys, self.tokenizer, self.ends = functions, keys, tokenizer, ends

    def judge(self, groups: Sequence[Group], step: int, last_step: int) -> RewardTable:
        """Sets `text`, `rewards` and `reward` of each completion. Raises RewardError."""
        pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        for _, rollout in pairs:
            rollout.text = self._text(rollout)
        # A completion whose environment failed has no reward.
        pairs = [pair for pair in pairs if pair[1].finish != "error"]
        table = self.functions.score([sample_of(*pair) for pair in pairs], step, max_steps=last_step)
        totals = table.totals() if table.values else [math.nan] * len(pairs)
        for number, ((_, rollout), total) in enumerate(zip(pairs, totals, strict=True)):
            rollout.rewards = {name: values[number] for name, values in table.values.items()}
            self._set_reward(rollout, total)
        return table

    def _set_reward(self, rollout: Rollout, total: float) -> None:
        """total: of the functions; NaN where they left the completion out."""
        environment_reward = rollout.episode.reward if rollout.episode is not None else None
        if rollout.episode is not None:
            rollout.rewards[ENVIRONMENT] = environment_reward
        parts = [] if math.isnan(total) else [total]
        parts += [] if environment_reward is None else [self.keys.environment_weight * environment_reward]
        rollout.reward = math.fsum(parts) + self._overlong(rollout) if parts else None

    def _text(self, rollout: Rollout) -> str:
        ids = rollout.tokens[:-1] if rollout.tokens and rollout.tokens[-1] in self.ends else rollout.tokens
        # A model has more ids than its tokenizer where the vocabulary is padded; they have no text.
        return self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])

    def _overlong(self, rollout: Rollout) -> float:
        keys = self.keys
        return overlong_penalty(rollout.length, keys.max_completion_length, keys.overlong_buffer, keys.overlong_penalty)


def sample_of(prompt: Prompt, rollout: Rollout) -> RewardSample:
    """A prompt that is a text has a text as completion, one of messages a list with the assistant's message, as in
    TRL; one with an environment all messages behind the prompt."""
    if rollout.episode is not None:
        episode = rollout.episode
        return RewardSample(episode.prompt, episode.messages, episode.prompt_tokens, rollout.tokens, prompt.columns)
    is_text = isinstance(prompt.content, str)
    completion: Any = rollout.text if is_text else [{"role": "assistant", "content": rollout.text}]
    return RewardSample(prompt.content, completion, prompt.tokens, rollout.tokens, prompt.columns)


def rewards_of(groups: Sequence[Group]) -> Values:
    """[P, G] of groups of one size; NaN for a completion that no function judged."""
    rows = [[math.nan if rollout.reward is None else rollout.reward for rollout in group.rollouts] for group in groups]
    return np.array(rows, np.float64)


def reward_metrics(groups: Sequence[Group], table: RewardTable) -> Mapping[str, float]:
    """Under TRL's names."""
    rewards = rewards_of(groups)
    metrics = {
        "reward": float(np.nanmean(rewards)) if not np.isnan(rewards).all() else math.nan,
        "reward_std": float(deviation(rewards, 1 if rewards.shape[1] > 1 else None).mean()),
        "frac_reward_zero_std": float(has_equal_rewards(rewards).mean()),
        **table.metrics,
        **episode_metrics([rollout for group in groups for rollout in group.rollouts]),
        **length_metrics([rollout for group in groups for rollout in group.rollouts]),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of completions with environments: their rewards, calls of tools of a completion, and the share that
    failed."""
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if not episodes:
        return {}
    mean, std = mean_and_std([episode.reward for episode in episodes if episode.reward is not None])
    sums: dict[str, float] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    metrics = {f"rewards/{ENVIRONMENT}/mean": mean, f"rewards/{ENVIRONMENT}/std": std}
    metrics |= {name: value / len(episodes) for name, value in sums.items()}
    failed = sum(rollout.finish == "error" for rollout in rollouts)
    return {**metrics, **({f"rewards/{ENVIRONMENT}/failed": float(failed)} if failed else {})}


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [rollout.length for rollout in rollouts]
    ended = [rollout.length for rollout in rollouts if rollout.finish == "stop"] or [0]
    named = {"length": lengths, "terminated_length": ended}
    metrics = {
        f"completions/{how}_{name}": float(function(values))
        for name, values in named.items()
        for how, function in (("mean", np.mean), ("min", np.min), ("max", np.max))
    }
    cut = sum(rollout.finish == "length" for rollout in rollouts)
    return {**metrics, "completions/clipped_ratio": cut / len(rollouts)}
