"""Environments and tools for tests, imported by processes of environments."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from mt_tune.environments.dialogues import Reply


class Counter:
    """An environment as TRL's environment_factory takes it."""

    def __init__(self, step: int = 1) -> None:
        self.step = step

    def reset(self, **row: Any) -> str | None:
        self.target, self.value = row["target"], 0
        if self.target == -1:
            time.sleep(60)
        return f" Reach {self.target}."

    def increase(self, by: int) -> str:
        """Increases the counter.

        Args:
            by: how much
        """
        if by == 100:
            time.sleep(60)
        if by == 200:
            os._exit(1)
        self.value += by * self.step
        return f"now {self.value}"

    def get_reward(self) -> float:
        return float(self.value == self.target)


class Echo:
    """A dialogue in which a user answers each turn of the model, and whose reward is the number of turns."""

    def begin(self, row: Mapping[str, Any]) -> _EchoDialogue:
        return _EchoDialogue(row["prompt"])

    def release(self, dialogue: _EchoDialogue) -> None: ...

    def close(self) -> None: ...


class _EchoDialogue:
    def __init__(self, prompt: list[Any]) -> None:
        self.prompt, self.tools, self.environment, self.turns = prompt, None, None, 0

    def reply(self, message: Mapping[str, Any]) -> Reply:
        self.turns += 1
        return Reply([{"role": "user", "content": "more"}], None, {"turns": 1.0})

    def end(self) -> Mapping[str, Any]:
        return {"reward": float(self.turns)}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b
