"""What a rollout asks of an environment. Tokens that the model drew are never encoded again: an episode is given ids,
and answers with the ids that come behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mt_core.errors import TrainingError

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Continuation:
    """What comes behind a turn of the model. token_ids: of tools' answers or a user's turn, up to where the model goes
    on; they have mask 0. done: nothing more is generated, and token_ids is empty. reward: of the environment; None
    where it gives none or none yet. metrics: numbers of the turn, such as calls of tools, to be added up."""

    token_ids: list[int]
    done: bool
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Episode(Protocol):
    """One conversation. prompt: its messages. prompt_ids: their tokens, up to where the model begins. messages: what
    was added behind the prompt so far, for reward functions (`completion`). environment: the object that acts, for
    reward functions that take `environments`; None without one."""

    prompt: list[Message]
    prompt_ids: list[int]
    messages: list[Message]
    environment: Any

    def after(self, completion_ids: Sequence[int], *, finished: bool = True) -> Continuation:
        """Takes a turn of the model: the ids since the last `after`, with the id that ended it if there is one.
        finished: false for a turn that was cut off at a length, which ends the episode.

        Raises EpisodeError for an environment that fails by its own fault.
        """
        ...


class Environment(Protocol):
    """Starts episodes."""

    def start(self, row: Mapping[str, Any]) -> Episode:
        """row: a record of the data set, with its `prompt`."""
        ...

    def release(self, episode: Episode) -> None:
        """Takes an episode back whose rewards are known; its environment may begin another one."""
        ...

    def close(self) -> None: ...


class EpisodeError(TrainingError):
    """An environment that failed by its own fault; the message names it and what it was doing."""
