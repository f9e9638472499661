"""TRL's tools and environment_factory, unchanged: functions that a model calls, and objects whose methods it calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mt_core.errors import ConfigError
from mt_tune.environments.base import EpisodeError, Message
from mt_tune.environments.dialogues import Dialogue, Reply
from mt_tune.environments.schemas import function_schema

Tool = Callable[..., Any]
Factory = Callable[[], Any]
NO_TOOLS = ("reset", "get_reward")
"""Public methods of TRL's environments that are no tools."""


class ToolDialogues:
    """Implements mt_tune.environments.dialogues.DialogueSource by tools, and by the objects that a factory makes.

    tools: functions with type hints and Google docstrings, which the model may call; sync or async. factory: makes an
    object with `reset(**row) -> str | None`, whose text is added to the prompt's last message, public methods, which
    are tools, and optionally `get_reward() -> float`. Objects that are released begin other dialogues.
    """

    def __init__(self, tools: Sequence[Tool] = (), factory: Factory | None = None) -> None:
        self._tools, self._factory = list(tools), factory
        self._free: list[Any] = []
        self._schemas: list[Any] | None = None

    def begin(self, row: Mapping[str, Any]) -> ToolDialogue:
        """Raises ConfigError for a row without a prompt of messages, EpisodeError where `reset` raises."""
        environment = self._environment()
        tools = {tool.__name__: tool for tool in [*self._tools, *methods_of(environment)]}
        if self._schemas is None:
            self._schemas = [function_schema(tool) for tool in tools.values()]
        prompt = _with_observation(_prompt(row, environment is not None), _observation(environment, row))
        return ToolDialogue(prompt, tools, self._schemas or None, environment)

    def release(self, dialogue: Dialogue) -> None:
        if dialogue.environment is not None:
            self._free.append(dialogue.environment)

    def close(self) -> None:
        self._free = []

    def _environment(self) -> Any:
        """An object that no dialogue uses; None without a factory."""
        if self._factory is None:
            return None
        if self._free:
            return self._free.pop()
        environment = self._factory()
        if not callable(getattr(environment, "reset", None)):
            raise ConfigError(f"the environment {type(environment).__name__} needs a method reset(**row)")
        return environment


def _observation(environment: Any, row: Mapping[str, Any]) -> Any:
    if environment is None:
        return None
    try:
        return _awaited(environment.reset(**row))
    except Exception as error:
        raise EpisodeError(f"{type(environment).__name__}.reset raised {type(error).__name__}: {error}") from error


class ToolDialogue:
    """Answers calls of tools; a turn without calls ends the episode."""

    def __init__(
        self, prompt: list[Message], tools: Mapping[str, Tool], schemas: list[Any] | None, environment: Any
    ) -> None:
        self.prompt, self.tools, self.environment = prompt, schemas, environment
        self._functions = tools

    def reply(self, message: Message) -> Reply:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        if not calls:
            return self.end()
        results = run_calls(self._functions, calls)
        messages: list[Message] = [
            {"role": "tool", "name": call["name"], "content": str(result)}
            for call, (result, _) in zip(calls, results, strict=True)
        ]
        failures = sum(failed for _, failed in results)
        return Reply(messages, None, {"tools/calls": float(len(calls)), "tools/failures": float(failures)})

    def end(self) -> Reply:
        if not callable(getattr(self.environment, "get_reward", None)):
            return Reply()
        name = type(self.environment).__name__
        try:
            reward = _awaited(self.environment.get_reward())
        except Exception as error:
            raise EpisodeError(f"{name}.get_reward raised {type(error).__name__}: {error}") from error
        if reward is not None and (not isinstance(reward, int | float) or reward != reward):
            raise EpisodeError(f"{name}.get_reward returned {reward!r}; it returns a number")
        return Reply(reward=None if reward is None else float(reward))


def run_calls(functions: Mapping[str, Tool], calls: Sequence[Mapping[str, Any]]) -> list[tuple[Any, bool]]:
    """For each call (its name and arguments) the result, and whether it failed: a model sees what it did wrong as
    {"error": ...}. Async functions wait together."""
    begun = [_begun(functions, call) for call in calls]
    if not any(inspect.isawaitable(result) for result, _ in begun):
        return begun
    return asyncio.run(_gathered(begun))


def _begun(functions: Mapping[str, Tool], call: Mapping[str, Any]) -> tuple[Any, bool]:
    if call["name"] not in functions:
        return {"error": f"Tool {call['name']} not found."}, True
    try:
        return functions[call["name"]](**call["arguments"]), False
    except Exception as error:
        return {"error": str(error)}, True


async def _gathered(begun: Sequence[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
    async def finished(result: Any, failed: bool) -> tuple[Any, bool]:
        if not inspect.isawaitable(result):
            return result, failed
        try:
            return await result, False
        except Exception as error:
            return {"error": str(error)}, True

    return await asyncio.gather(*(finished(result, failed) for result, failed in begun))


def _awaited(result: Any) -> Any:
    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def methods_of(environment: Any) -> list[Tool]:
    """The public methods of an environment that are tools."""
    if environment is None:
        return []
    # Of the class: properties are not evaluated.
    functions = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    public = [name for name, _ in functions if name not in NO_TOOLS and not name.startswith("_")]
    return [getattr(environment, name) for name in public]


def _prompt(row: Mapping[str, Any], has_environment: bool) -> list[Message]:
    """The row's messages; an environment may give all of the prompt."""
    prompt = row.get("prompt", [{"role": "user", "content": ""}] if has_environment else None)
    if isinstance(prompt, str) or not prompt:
        raise ConfigError(
            'tools and environments need prompts that are lists of messages, [{"role": "user", "content": ...}]: a '
            "text gets no chat template"
        )
    return [dict(message) for message in prompt]


def _with_observation(prompt: list[Message], observation: Any) -> list[Message]:
    if observation is None:
        return prompt
    if not isinstance(observation, str):
        raise EpisodeError(f"reset returned {type(observation).__name__}; it returns a text or None")
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]
