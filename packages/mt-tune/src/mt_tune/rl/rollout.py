"""Completions of prompts that the policy drew, in groups, as JSON values for checkpoints and rollouts.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mt_tune.rl.prompts import Key, Prompt

Finish = Literal["stop", "length", "error"]


@dataclass
class EpisodeRecord:
    """A conversation with an environment. prompt_tokens: with the tools that the environment describes. prompt: their
    messages; messages: those behind. reward: of the environment; None without one. metrics: sums over its turns."""

    prompt_tokens: list[int]
    prompt: list[Mapping[str, Any]]
    messages: list[Mapping[str, Any]]
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, reward: float | None, metrics: Mapping[str, float]) -> None:
        """What the environment has answered to a turn."""
        self.reward = self.reward if reward is None else reward
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value


@dataclass
class Rollout:
    """One completion. Lists have an entry for each token: drawn is 1 for those of the policy and 0 for those that tools
    added, logps are log-probabilities as generation reported them (0 where not drawn), versions are the number of the
    optimizer step whose weights drew it. finish: None while it is not finished; error where its environment failed.
    episode: of a completion with an environment."""

    tokens: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    text: str = ""
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    """The weighted sum; None where no function judged it."""
    experts: str = ""
    """With rl.routing_replay: those that the tokens went through, see routing_record."""
    episode: EpisodeRecord | None = None

    def add(self, token: int, logp: float, version: int) -> None:
        self.tokens.append(token)
        self.drawn.append(1)
        self.logps.append(logp)
        self.versions.append(version)

    def add_given(self, tokens: Sequence[int]) -> None:
        """Tokens that the policy did not draw."""
        self.tokens += tokens
        self.drawn += [0] * len(tokens)
        self.logps += [0.0] * len(tokens)
        self.versions += [self.versions[-1]] * len(tokens)

    @property
    def length(self) -> int:
        """Tokens that the policy drew."""
        return sum(self.drawn)


@dataclass
class Group:
    """The completions of one prompt. position: the number of the prompt in the run's order."""

    prompt: Prompt
    position: int
    rollouts: list[Rollout]

    @property
    def is_finished(self) -> bool:
        return all(rollout.finish is not None for rollout in self.rollouts)

    @property
    def oldest_version(self) -> int | None:
        versions = [version for rollout in self.rollouts for version in rollout.versions]
        return min(versions, default=None)

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": list(self.prompt.key),
            "position": self.position,
            "rollouts": [asdict(rollout) for rollout in self.rollouts],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], prompts: Mapping[Key, Prompt]) -> Group:
        file, line = value["prompt"]
        return cls(prompts[file, line], value["position"], [rollout_of_json(rollout) for rollout in value["rollouts"]])

    def tokens_before(self, rollout: Rollout) -> Sequence[int]:
        """Up to where the completion begins."""
        return self.prompt.tokens if rollout.episode is None else rollout.episode.prompt_tokens


def rollout_of_json(value: Mapping[str, Any]) -> Rollout:
    episode = value.get("episode")
    return Rollout(**{**value, "episode": None if episode is None else EpisodeRecord(**episode)})
