"""Calls of reward functions: arguments, the signatures of TRL and verl, and checks of what they return.

Runs in worker processes, and in the process of training where rewards.workers=0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mt_core.errors import MtError
from mt_tune.rewards.base import RewardSample, text_of

RESERVED = ("prompt", "completion", "completion_ids")
"""Columns of rows that TRL does not hand on."""


@dataclass(frozen=True)
class Call:
    """One call. function: its number. columns: prompts, completions, completion_ids and the columns of the rows.
    environments: TRL's, one for each sample, for calls in the process of training."""

    function: int
    columns: Mapping[str, Sequence[Any]]
    step: int
    max_steps: int | None = None
    environments: Sequence[Any] | None = None

    @property
    def count(self) -> int:
        return len(self.columns["prompts"])


@dataclass(frozen=True)
class Judged:
    """What a call has returned and logged. metrics: name -> values logged, which are averaged."""

    values: list[float | None]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """Why there is no result. sample: its number in the call, if it is known. wrong: the function returned something
    that is no list of rewards, which is never left out."""

    reason: str
    sample: int | None = None
    wrong: bool = False


Outcome = Judged | Failed


def columns_of(samples: Sequence[RewardSample]) -> dict[str, list[Any]]:
    """The keyword arguments of TRL's reward functions; rows without a column of the others have None there."""
    names = dict.fromkeys(name for sample in samples for name in sample.row if name not in RESERVED)
    return {
        "prompts": [sample.prompt for sample in samples],
        "completions": [sample.completion for sample in samples],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
        **{name: [sample.row.get(name) for sample in samples] for name in names},
    }


class LoadedFunction:
    """A function that was imported, whatever its signature is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        names = _parameter_names(function)
        self._function = verl_function(function) if {"solution_str", "ground_truth"} <= names else function
        self.is_async = is_async(self._function)

    def judge(self, call: Call) -> Outcome:
        """The rewards. An async function is run to its end."""
        log = _Log(call.count)
        try:
            returned = self._begun(call, log)
            return _outcome(asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned, log)
        except Exception as error:
            return _failed(error)

    async def judge_async(self, call: Call) -> Outcome:
        """The same as `judge`, for several at a time."""
        log = _Log(call.count)
        try:
            return _outcome(await _awaited(self._begun(call, log)), log)
        except Exception as error:
            return _failed(error)

    def _begun(self, call: Call, log: _Log) -> Any:
        environments = {} if call.environments is None else {"environments": list(call.environments)}
        return self._function(
            **call.columns,
            **environments,
            trainer_state=SimpleNamespace(global_step=call.step, max_steps=call.max_steps),
            log_extra=log.extra,
            log_metric=log.metric,
        )


def judge_together(calls: Sequence[tuple[LoadedFunction, Call]]) -> list[Outcome]:
    """Outcomes of calls of async functions, which wait at the same time."""

    async def gathered() -> list[Outcome]:
        return await asyncio.gather(*(function.judge_async(call) for function, call in calls))

    return asyncio.run(gathered()) if calls else []


async def _awaited(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _outcome(returned: Any, log: _Log) -> Outcome:
    values = checked(returned, log.count)
    return values if isinstance(values, Failed) else Judged(values, log.metrics, log.columns)


def _failed(error: Exception) -> Failed:
    if isinstance(error, _SampleError):
        return Failed(str(error), error.sample, wrong=True)
    return Failed(f"{'' if isinstance(error, MtError) else 'raised '}{described(error)}")


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def described(error: BaseException) -> str:
    """Type, message and the line that raised it; the message of an error that is meant for users."""
    if isinstance(error, MtError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    text = str(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


# -- results -----------------------------------------------------------------------------------------


def checked(returned: Any, count: int) -> list[float | None] | Failed:
    """The rewards as numbers, or what is wrong about them."""
    # NumPy's arrays and torch's tensors have tolist.
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        return Failed(f"returned {type(returned).__name__}; a list with a reward for each sample is needed", wrong=True)
    if len(values) != count:
        return Failed(f"returned {len(values)} rewards for {count} samples", wrong=True)
    rewards: list[float | None] = []
    for number, value in enumerate(values):
        reward = _number(value)
        if isinstance(reward, str):
            return Failed(reward, number, wrong=True)
        rewards.append(reward)
    return rewards


def _number(value: Any) -> float | str | None:
    """The reward, or a text that says why it is none."""
    if value is None:
        return None
    # A scalar of NumPy or torch.
    scalar = value.item() if hasattr(value, "item") and not isinstance(value, int | float) else value
    if not isinstance(scalar, int | float):
        return f"returned {value!r:.80}; a reward is a number, or None to leave the sample out"
    if not math.isfinite(scalar):
        return f"returned {scalar}; a reward is finite, or None to leave the sample out"
    return float(scalar)


class _Log:
    """TRL's log_metric and log_extra of one call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.metrics: dict[str, list[float]] = {}
        self.columns: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(str(name), []).append(float(value))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        listed = list(values)
        if len(listed) != self.count:
            raise ValueError(f"log_extra({column!r}) with {len(listed)} values for {self.count} samples")
        self.columns[str(column)] = listed


# -- verl's compute_score ----------------------------------------------------------------------------


class _SampleError(Exception):
    def __init__(self, sample: int, reason: str) -> None:
        super().__init__(reason)
        self.sample = sample


def verl_function(compute_score: Callable[..., Any]) -> Callable[..., Any]:
    """A function of TRL's signature from verl's compute_score(data_source, solution_str, ground_truth, extra_info),
    which returns a number or a mapping with "score"; further numbers of the mapping become metrics.

    The ground truth is the column `reward_model` (its "ground_truth", as in verl's data) or `ground_truth`.
    """

    def arguments(completion: Any, number: int, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "data_source": _entry(columns, "data_source", number),
            "solution_str": text_of(completion),
            "ground_truth": _ground_truth(columns, number),
            "extra_info": _entry(columns, "extra_info", number),
        }

    def judge(completions: Sequence[Any], **columns: Any) -> list[Any]:
        scores = [compute_score(**arguments(text, number, columns)) for number, text in enumerate(completions)]
        return [_score(score, number, columns["log_metric"]) for number, score in enumerate(scores)]

    async def judge_async(completions: Sequence[Any], **columns: Any) -> list[Any]:
        begun = (compute_score(**arguments(text, number, columns)) for number, text in enumerate(completions))
        scores = await asyncio.gather(*begun)
        return [_score(score, number, columns["log_metric"]) for number, score in enumerate(scores)]

    return judge_async if is_async(compute_score) else judge


def _entry(columns: Mapping[str, Any], name: str, number: int) -> Any:
    return columns[name][number] if name in columns else None


def _ground_truth(columns: Mapping[str, Any], number: int) -> Any:
    nested = _entry(columns, "reward_model", number)
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    if "ground_truth" in columns:
        return columns["ground_truth"][number]
    raise _SampleError(number, 'the row has neither reward_model["ground_truth"] nor ground_truth, for compute_score')


def _score(score: Any, number: int, log_metric: Callable[[str, float], None]) -> Any:
    if not isinstance(score, Mapping):
        return score
    if "score" not in score:
        raise _SampleError(number, f'compute_score returned the keys {", ".join(map(str, score))} and no "score"')
    for name, value in score.items():
        if name != "score" and isinstance(value, int | float):
            log_metric(str(name), float(value))
    return score["score"]


def _parameter_names(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtin functions have none
        return set()
