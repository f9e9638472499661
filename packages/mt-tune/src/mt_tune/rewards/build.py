"""Reward functions by the section [rewards]: registered ones by name, and those of the user's modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mt_core.errors import ConfigError, MtError, did_you_mean
from mt_core.plugins import PluginHost
from mt_tune.rewards.callers import Caller, InProcess
from mt_tune.rewards.calling import described
from mt_tune.rewards.config import RewardsConfig
from mt_tune.rewards.pool import WorkerPool
from mt_tune.rewards.references import FunctionReference, module_reference
from mt_tune.rewards.reward_specs import REWARDS
from mt_tune.rewards.scoring import NamedReward, RewardFunctions


def build_rewards(
    keys: RewardsConfig, host: PluginHost, functions: Mapping[str, Callable[..., Any]] | None = None
) -> RewardFunctions:
    """The functions of the section, then those that a program gives by name, which run in this process.

    Worker processes are started and have imported their functions when this returns. Raises ConfigError for functions
    that are not known, that cannot be imported, and for keys that do not fit them.
    """
    chosen = [chosen_function(text, keys, host) for text in keys.functions]
    names = [*(entry.name for entry in chosen), *(functions or {})]
    _check_names(names, keys)
    callers = _callers(chosen, list((functions or {}).values()), keys)
    weights = keys.weights or [1.0] * len(names)
    rewards = [
        NamedReward(name, callers[number], weight, chosen[number].samples_per_call if number < len(chosen) else None)
        for number, (name, weight) in enumerate(zip(names, weights, strict=True))
    ]
    return RewardFunctions(rewards, skip_failures=keys.on_failure == "skip")


def _callers(
    chosen: list[ChosenFunction], functions: list[Callable[..., Any]], keys: RewardsConfig
) -> dict[int, Caller]:
    """What calls each function, by its number: those that a program gives stand behind the chosen ones."""
    remote = {number: entry for number, entry in enumerate(chosen) if keys.workers and not entry.in_process}
    local = {number: _loaded(entry) for number, entry in enumerate(chosen) if number not in remote}
    local |= {len(chosen) + place: function for place, function in enumerate(functions)}
    callers: dict[int, Caller] = dict.fromkeys(local, InProcess(local))
    if remote:
        callers |= dict.fromkeys(remote, _pool(remote, keys))
    return callers


def _loaded(entry: ChosenFunction) -> Callable[..., Any]:
    try:
        return entry.reference.load()
    except MtError:
        raise
    except Exception as error:
        raise ConfigError(f"rewards.functions: {entry.name}: cannot be imported: {described(error)}") from error


def _pool(entries: Mapping[int, ChosenFunction], keys: RewardsConfig) -> WorkerPool:
    return WorkerPool(
        {number: entry.reference for number, entry in entries.items()},
        {number: entry.name for number, entry in entries.items()},
        workers=keys.workers,
        deadline_seconds=keys.deadline_seconds,
        memory_mb=keys.memory_mb,
    )


@dataclass(frozen=True)
class ChosenFunction:
    """An entry of rewards.functions. samples_per_call: None for all."""

    name: str
    reference: FunctionReference
    samples_per_call: int | None
    in_process: bool


def chosen_function(text: str, keys: RewardsConfig, host: PluginHost) -> ChosenFunction:
    """Raises PluginError for a name that no plugin registers, ConfigError for a module that rewards.modules lacks."""
    label, _, name = text.rpartition("=")
    if ":" in name:
        return _of_module(label, name, keys)
    if "." in name and name not in host[REWARDS].names():
        # TRL names functions so.
        return _of_module(label, name, keys)
    spec = host[REWARDS].get(name, key="rewards.functions")
    options = keys.options.get(label or name, {})
    module, _, attribute = spec.build.reference.partition(":")
    reference = FunctionReference(module, attribute, options=options, registered=True)
    return ChosenFunction(label or name, reference, 1 if spec.one_at_a_time else None, spec.in_process)


def _of_module(label: str, name: str, keys: RewardsConfig) -> ChosenFunction:
    located = module_reference(name, keys.modules, "rewards.functions")
    label = label or located.attribute.rpartition(".")[2]
    reference = replace(located, options=keys.options.get(label))
    return ChosenFunction(label, reference, keys.samples_per_call, in_process=False)


def _check_names(names: list[str], keys: RewardsConfig) -> None:
    if not names:
        raise ConfigError("rewards.functions is empty; name at least one reward, such as accuracy")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'rewards.functions has two functions named {name}; name one of them as "LABEL={name}"')
    if keys.weights and len(keys.weights) != len(names):
        raise ConfigError(
            f"rewards.weights has {len(keys.weights)} factors for {len(names)} functions; give one for each"
        )
    for name in keys.options:
        if name not in names:
            raise ConfigError(f"rewards.options.{name}: rewards.functions has no {name}{did_you_mean(name, names)}")
