"""The registered environment of reasoning-gym's tasks (pip install reasoning-gym): a question, and the score of its
answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mt_core.errors import ConfigError
from mt_tune.environments.base import EpisodeError, Message
from mt_tune.environments.dialogues import Dialogue, Reply

NAME, ITEM = "reasoning_gym", "item"
"""The environment, and the column of a row that has the number of its question."""
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def build_reasoning_gym(options: Mapping[str, Any]) -> ReasoningGym:
    """options: `dataset`, the name of a task, and the keyword arguments of reasoning_gym.create_dataset, such as `size`
    and `seed`. Raises ConfigError for a task that is not there, and for arguments that it does not take."""
    if "dataset" not in options:
        raise ConfigError(f"the environment {NAME} needs rl.environment_options.{NAME}.dataset, the name of a task")
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(f"the environment {NAME} needs the package: pip install reasoning-gym") from error
    keys = dict(options)
    try:
        return ReasoningGym(reasoning_gym.create_dataset(keys.pop("dataset"), **keys))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"rl.environment_options.{NAME}: {error}") from error


class ReasoningGym:
    """Implements mt_tune.environments.dialogues.DialogueSource. dataset: of reasoning-gym."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def begin(self, row: Mapping[str, Any]) -> Dialogue:
        """The row's last message, with the question of the number in its column `item`."""
        number = row.get(ITEM)
        if not isinstance(number, int) or not 0 <= number < len(self._dataset):
            raise EpisodeError(
                f"{NAME}: the column {ITEM} is {number!r}; it is the number of a question, 0 to "
                f"{len(self._dataset) - 1}"
            )
        return _Question(self._dataset, self._dataset[number], row["prompt"])

    def release(self, dialogue: Dialogue) -> None: ...

    def close(self) -> None: ...


class _Question:
    """One turn. The answer stands in the last <answer>...</answer>, or is all of the turn."""

    tools: list[Any] | None = None
    environment: Any = None

    def __init__(self, dataset: Any, item: Any, prompt: list[Message]) -> None:
        self._dataset, self._item, self._answer = dataset, item, ""
        self.prompt: list[Message] = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + item["question"]}]

    def reply(self, message: Message) -> Reply:
        text = str(message.get("content") or "")
        answers = ANSWER.findall(text)
        self._answer = (answers[-1] if answers else text).strip()
        return self.end()

    def end(self) -> Reply:
        return Reply(reward=float(self._dataset.score_answer(self._answer or None, self._item)))
