"""Completions of prompts that the policy drew, in groups, as JSON values for checkpoints and rollouts.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mt_tune.rl.prompts import Key, Prompt

Finish = Literal["stop", "length"]


@dataclass
class Rollout:
    """One completion. Lists have an entry for each token: drawn is 1 for those of the policy and 0 for those that tools
    added, logps are log-probabilities as generation reported them (0 where not drawn), versions are the number of the
    optimizer step whose weights drew it. finish: None while it is not finished."""

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

    def add(self, token: int, logp: float, version: int) -> None:
        self.tokens.append(token)
        self.drawn.append(1)
        self.logps.append(logp)
        self.versions.append(version)

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
        return cls(prompts[file, line], value["position"], [Rollout(**rollout) for rollout in value["rollouts"]])
