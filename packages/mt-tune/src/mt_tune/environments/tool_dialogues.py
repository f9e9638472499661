"""TRL's tools and environment_factory, unchanged: functions that a model calls, and objects whose methods it calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mt_core.errors import ConfigError, did_you_mean
from mt_tune.environments.base import Episode, EpisodeError, Message
from mt_tune.environments.dialogues import Reply, TokenEpisode, plain_turn, turn_reader
from mt_tune.environments.schemas import function_schema
from mt_tune.environments.turns import TurnEncoder

Tool = Callable[..., Any]
Factory = Callable[[], Any]
NO_TOOLS = ("reset", "get_reward")
"""Public methods of TRL's environments that are no tools."""
COLUMN = "environment"
"""The column that chooses one of several factories."""


class ToolEnvironment:
    """Implements mt_tune.environments.base.Environment by tools, and by environments that a factory makes.

    tools: functions with type hints and Google docstrings, which the model may call; sync or async. factories: one
    under None, or several by the name that the column `environment` of a row has. Each makes an object with
    `reset(**row) -> str | None`, whose text is added to the prompt's last message, public methods, which are tools, and
    optionally `get_reward() -> float`. Objects that are released begin other episodes.
    """

    def __init__(
        self,
        encoder: TurnEncoder,
        tools: Sequence[Tool] = (),
        factories: Mapping[str | None, Factory] | None = None,
        *,
        max_turns: int | None = None,
    ) -> None:
        self._encoder, self._tools, self._factories = encoder, list(tools), dict(factories or {})
        self._max_turns = max_turns
        self._free: dict[str | None, list[Any]] = {name: [] for name in self._factories}
        self._names: dict[int, str | None] = {}
        self._schemas: dict[str | None, list[Any]] = {}
        self._read_turn = turn_reader(encoder.template.source)

    def start(self, row: Mapping[str, Any]) -> Episode:
        """Raises DataError and ConfigError for a row without a prompt or with an unknown environment, EpisodeError
        where `reset` raises."""
        name = self._name(row)
        environment = self._environment(name)
        tools = {tool.__name__: tool for tool in [*self._tools, *methods_of(environment)]}
        if name not in self._schemas:
            self._schemas[name] = [function_schema(tool) for tool in tools.values()]
        prompt = _with_observation(_prompt(row, environment is not None), self._observation(environment, name, row))
        dialogue = ToolDialogue(prompt, tools, self._schemas[name] or None, environment)
        read = self._read_turn if tools else plain_turn
        return TokenEpisode(dialogue, self._encoder, read, self._max_turns)

    def release(self, episode: Episode) -> None:
        if episode.environment is not None:
            self._free[self._names[id(episode.environment)]].append(episode.environment)

    def close(self) -> None:
        self._free = {name: [] for name in self._factories}

    def _name(self, row: Mapping[str, Any]) -> str | None:
        if not self._factories or None in self._factories:
            return None
        name = row.get(COLUMN)
        if name not in self._factories:
            known = [str(each) for each in self._factories]
            raise ConfigError(
                f"the row's column environment is {name!r}; the factories are {', '.join(known)}"
                f"{did_you_mean(str(name), known)}"
            )
        return name

    def _environment(self, name: str | None) -> Any:
        """An object that no episode uses; None without factories."""
        if not self._factories:
            return None
        if self._free[name]:
            return self._free[name].pop()
        environment = self._factories[name]()
        if not callable(getattr(environment, "reset", None)):
            raise ConfigError(f"the environment {type(environment).__name__} needs a method reset(**row)")
        self._names[id(environment)] = name
        return environment

    def _observation(self, environment: Any, name: str | None, row: Mapping[str, Any]) -> Any:
        if environment is None:
            return None
        given = {key: value for key, value in row.items() if name is None or key != COLUMN}
        try:
            return _awaited(environment.reset(**given))
        except Exception as error:
            kind = type(environment).__name__
            raise EpisodeError(f"{kind}.reset raised {type(error).__name__}: {error}") from error


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
