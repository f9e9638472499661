"""The registered environment of verifiers' tasksets (pip install verifiers, 0.4 and later).

verifiers plays an episode of a task and asks an endpoint for each turn of the model. The endpoint is in this process: a
request waits until the policy has drawn the turn, and what the next request adds is what comes behind it. So tools,
users and scores are those of verifiers, and tokens are drawn and kept by mt.

python -m mt_tune.environments.verifiers TASKSET > prompts.jsonl writes the rows of a taskset.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from mt_core.errors import ConfigError
from mt_tune.environments.base import EpisodeError, Message
from mt_tune.environments.dialogues import Dialogue, Reply
from mt_tune.environments.verifiers_episodes import EpisodeEnd, ModelRequest, OpenEpisode, PlayedEpisodes

NAME, ITEM = "verifiers", "item"
"""The environment, and the column of a row that has the number of its task."""
OPTIONS = f"rl.environment_options.{NAME}"
SEAT = "agent"
LOCAL: Mapping[str, Any] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""A chat with the task's tools, in a process of this machine."""


def build_verifiers(options: Mapping[str, Any]) -> VerifiersEnvironment:
    """options: keys of verifiers' section [env], of which `taskset` (its id, or its keys with `id`) is needed, and
    `agent` replaces keys of the seat: by default the harness null in the runtime subprocess. Raises ConfigError for
    what verifiers refuses, several seats, and a taskset without an end."""
    if not options.get("taskset"):
        raise ConfigError(f"the environment {NAME} needs {OPTIONS}.taskset, the id of an installed taskset")
    return VerifiersEnvironment(load_environment(options))


def load_environment(options: Mapping[str, Any]) -> Any:
    """verifiers' Env."""
    try:
        from verifiers.v1 import AgentConfig, Env, EnvConfig
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import environment_class
    except ImportError as error:
        raise ConfigError(f"the environment {NAME} needs the package: pip install 'verifiers>=0.4'") from error
    taskset = options["taskset"]
    keys = {**options, "taskset": {"id": taskset} if isinstance(taskset, str) else dict(taskset)}
    keys[SEAT] = {**LOCAL, **keys.get(SEAT, {})}
    try:
        kind = environment_class(keys["taskset"].get("id", ""), keys.get("id", ""))
        config = concrete_type(kind, EnvConfig, origin=Env) or EnvConfig
        seats = [name for name, field in config.model_fields.items() if isinstance(field.default, AgentConfig)]
        if seats != [SEAT]:
            raise ConfigError(
                f"{OPTIONS}: {kind.__name__} has the seats {', '.join(seats) or 'none'}, and one policy is trained, "
                f"which plays the seat {SEAT}"
            )
        return kind(config.model_validate(keys))
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"{OPTIONS}: {error}") from error


class VerifiersEnvironment:
    """Implements mt_tune.environments.dialogues.DialogueSource. env: of verifiers."""

    def __init__(self, env: Any) -> None:
        if not env.taskset.bounded:
            raise ConfigError(f"{OPTIONS}.taskset has tasks without an end, and rows name tasks by their number")
        self._env, self.tasks = env, list(env.taskset)
        self._played: PlayedEpisodes | None = None

    def begin(self, row: Mapping[str, Any]) -> Dialogue:
        """The conversation of the task with the number in the row's column `item`."""
        number = row.get(ITEM)
        if not isinstance(number, int) or not 0 <= number < len(self.tasks):
            raise EpisodeError(
                f"{NAME}: the column {ITEM} is {number!r}; it is the number of a task, 0 to {len(self.tasks) - 1}"
            )
        task = self.tasks[number]
        wanted = prompt_of(task)
        if wanted and without_other_keys(row["prompt"]) != wanted:
            raise EpisodeError(
                f"{NAME}: the row's prompt is not that of task {number} of the taskset; write rows with "
                "python -m mt_tune.environments.verifiers TASKSET"
            )
        # Here and not in the constructor: this process may be forked from the one that has loaded the taskset.
        self._played = self._played or PlayedEpisodes(self._env)
        return _TaskDialogue(self._played, task)

    def release(self, dialogue: Dialogue) -> None:
        assert isinstance(dialogue, _TaskDialogue)
        dialogue.abandon()

    def close(self) -> None:
        if self._played is not None:
            self._played.close()


class _TaskDialogue:
    """One episode."""

    environment: Any = None

    def __init__(self, played: PlayedEpisodes, task: Any) -> None:
        self._played = played
        self._episode: OpenEpisode = played.begin(task)
        event = played.next_event(self._episode)
        if isinstance(event, EpisodeEnd):
            raise EpisodeError(
                f"{NAME}: the episode ended before the model's turn: {event.error or 'without an error'}"
            )
        self._calls = count()
        self._sent: list[Message] = event.messages
        self.prompt, self.tools = list(event.messages), event.tools

    def reply(self, message: Message) -> Reply:
        self._played.answer(self._episode, wire_message(message, self._calls), cut=False)
        return self._following(self._played.next_event(self._episode))

    def end(self) -> Reply:
        """Without the turn that was cut off, which the environment sees as an empty one."""
        self._played.answer(self._episode, {"role": "assistant", "content": ""}, cut=True)
        event = self._played.next_event(self._episode)
        return self._following(event) if isinstance(event, EpisodeEnd) else Reply()

    def abandon(self) -> None:
        self._played.abandon(self._episode)

    def _following(self, event: ModelRequest | EpisodeEnd) -> Reply:
        if isinstance(event, EpisodeEnd):
            if event.error is not None:
                raise EpisodeError(f"{NAME}: {event.error}")
            return Reply(
                reward=event.reward, metrics={f"{NAME}/{name}": value for name, value in event.metrics.items()}
            )
        kept, (turn, *new) = event.messages[: len(self._sent)], event.messages[len(self._sent) :] or [{}]
        if kept != self._sent or turn.get("role") != "assistant" or not new or has_turn(new):
            raise EpisodeError(
                f"{NAME}: the harness has changed earlier messages, so that the tokens that the policy drew are no "
                "longer a part of the conversation; use one that adds messages alone, without compaction"
            )
        self._sent = event.messages
        return Reply(messages=new)


def has_turn(messages: Sequence[Message]) -> bool:
    return any(message.get("role") == "assistant" for message in messages)


def wire_message(message: Message, numbers: Any) -> Message:
    """A turn as OpenAI's chat completions have it: arguments of tools are a text, and calls have ids."""
    calls = [
        {
            "id": f"call_{next(numbers)}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls") or []
    ]
    content = message.get("content") or ""
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def prompt_of(task: Any) -> list[Message]:
    """The messages with which a task begins; none where its environment does."""
    data = task.data
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if data.prompt is None:
        return []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return without_other_keys([*system, *(message.model_dump(exclude_none=True) for message in data.prompt)])


def without_other_keys(messages: Sequence[Message]) -> list[Message]:
    return [{"role": message["role"], "content": message.get("content")} for message in messages]


def rows_of(tasks: Sequence[Any]) -> list[Mapping[str, Any]]:
    """What a file of prompts has for a taskset. Tasks that their environment begins have a message that says so, since
    a prompt may not be empty."""
    opened = [{"role": "user", "content": "(the environment begins)"}]
    return [{"prompt": prompt_of(task) or opened, ITEM: number} for number, task in enumerate(tasks)]


if __name__ == "__main__":
    for each in rows_of(build_verifiers({"taskset": sys.argv[1]}).tasks):
        print(json.dumps(each, ensure_ascii=False))
