"""The rules of [rl] that span keys and sections."""

from __future__ import annotations

import math
from typing import Any

from mt_core.errors import ConfigError
from mt_tune.rl.config import DROPOUTS, GAE, POLICY, PROMPTS, REFERENCE_NEEDED, ROLLOUTS, RLConfig


def check_rl(config: Any) -> None:
    """The rules of [rl] that other sections are part of. Raises ConfigError."""
    if config.train.loss != POLICY:
        return
    keys: RLConfig = config.section(RLConfig)
    _require_parts(config)
    _check_environments(keys)
    _check_batch(config, keys)
    _check_loss(config, keys)
    for name in DROPOUTS:
        if getattr(config.model, name, None):
            raise ConfigError(
                f"model.{name}={getattr(config.model, name)}: with dropout the policy that is trained is not the one "
                "that drew the completions; set it to 0"
            )


def _check_environments(keys: RLConfig) -> None:
    if keys.has_environment and keys.routing_replay:
        raise ConfigError(
            "rl.routing_replay=true records the experts of completions that are drawn at once, and those with "
            "rl.environments and rl.tools are drawn turn by turn; set it to false"
        )
    if keys.has_environment and keys.extra_groups:
        raise ConfigError(
            f"rl.extra_groups={keys.extra_groups} continues completions in the next generation, which conversations "
            "with rl.environments and rl.tools do not; set it to 0"
        )


def _require_parts(config: Any) -> None:
    for key, value, wanted in (
        ("data.dataset_type", config.data.dataset_type, PROMPTS),
        ("train.batch_source", config.train.batch_source, ROLLOUTS),
    ):
        if value != wanted:
            raise ConfigError(
                f'train.loss="{POLICY}" trains on completions of prompts; set {key} (now {value}) to "{wanted}"'
            )
    if config.train.train_epochs is not None:
        raise ConfigError(
            "train.train_epochs counts prompts, and a step takes completions; give train.train_iters in its place"
        )


def _check_batch(config: Any, keys: RLConfig) -> None:
    from mt_core.data.training_length import global_batch_size

    batch = global_batch_size(config)
    if keys.group_size < 2 and keys.advantage not in ("reinforce_plus_plus", GAE):
        raise ConfigError(
            f"rl.group_size={keys.group_size}: rl.advantage={keys.advantage} compares the completions of a prompt; "
            "give at least 2, or take reinforce_plus_plus or gae"
        )
    if keys.group_size < 2 and keys.dynamic_sampling:
        raise ConfigError(
            "rl.dynamic_sampling leaves out prompts whose completions have equal rewards, and with rl.group_size=1 "
            "there is nothing to compare; set it to false"
        )
    if batch % keys.group_size:
        raise ConfigError(
            f"train.global_batch_size={batch} completions are no whole number of groups of rl.group_size="
            f"{keys.group_size}; give a multiple of it"
        )
    for size in (config.train.rampup_batch_size or ())[:2]:
        if size % keys.group_size:
            raise ConfigError(
                f"train.rampup_batch_size={list(config.train.rampup_batch_size)}: {size} completions are no whole "
                f"number of groups of rl.group_size={keys.group_size}; give multiples of it"
            )
    smallest = min(batch, *(config.train.rampup_batch_size or [batch])[:1])
    _check_staleness(keys, smallest)
    if keys.overlong_buffer > keys.max_completion_length:
        raise ConfigError(
            f"rl.overlong_buffer={keys.overlong_buffer} is above rl.max_completion_length={keys.max_completion_length}"
        )


def _check_loss(config: Any, keys: RLConfig) -> None:
    _check_values(keys)
    if keys.beta and config.checkpoint.start is None:
        raise ConfigError(REFERENCE_NEEDED.format(beta=keys.beta) + "; set it, or rl.beta to 0")
    if keys.delta is not None and not keys.delta > 1 + keys.high:
        raise ConfigError(f"rl.delta={keys.delta} is not above 1 + rl.epsilon_high={1 + keys.high}")
    if keys.delta is not None and keys.loss != "clip":
        raise ConfigError(f"rl.delta={keys.delta} has no effect with rl.loss={keys.loss}")
    if not math.isclose(keys.sampling_correction_min, 0.0) and not keys.sampling_correction.endswith("mask"):
        raise ConfigError(
            f"rl.sampling_correction_min={keys.sampling_correction_min} has no effect with rl.sampling_correction="
            f"{keys.sampling_correction}; take one of the masks"
        )


def _check_staleness(keys: RLConfig, batch: int) -> None:
    if (keys.environments or keys.tools) and (keys.asynchronous or keys.extra_groups):
        raise ConfigError(
            "conversations with environments and tools cannot go on over a change of weights, since an environment's "
            "state is in no checkpoint; set rl.asynchronous=false and rl.extra_groups=0, or leave out rl.environments "
            "and rl.tools"
        )
    if not keys.max_staleness and not keys.extra_groups:
        return
    if not keys.asynchronous and not keys.extra_groups:
        raise ConfigError(
            f"rl.max_staleness={keys.max_staleness} has no effect: completions are stale where they are drawn ahead "
            "(rl.asynchronous=true) or go on over a change of weights (rl.extra_groups)"
        )
    generations = int(keys.asynchronous) + int(keys.extra_groups > 0)
    if keys.max_staleness < generations * keys.updates:
        raise ConfigError(
            f"rl.max_staleness={keys.max_staleness}: a generation is {keys.updates} steps, and completions of "
            f"{generations} before are used with rl.asynchronous={str(keys.asynchronous).lower()} and rl.extra_groups="
            f"{keys.extra_groups}; give at least {generations * keys.updates}, or turn these off"
        )
    needed = batch * keys.steps_per_generation // keys.group_size
    if keys.extra_groups > needed:
        raise ConfigError(
            f"rl.extra_groups={keys.extra_groups} is above the {needed} groups of a generation, so that some would "
            "wait for more than one; lower it"
        )
    if keys.sampling_correction == "none":
        raise ConfigError(
            "rl.max_staleness above 0 trains on completions of older weights, which rl.sampling_correction weighs; it "
            'is "none": take token_truncate or another one'
        )


def _check_values(keys: RLConfig) -> None:
    if keys.advantage == GAE:
        return
    for name in ("gamma", "lam", "value_model", "value_lr", "value_clip"):
        if getattr(keys, name) != RLConfig.model_fields[name].default:
            raise ConfigError(
                f"rl.{name}={getattr(keys, name)} is of a value model, and rl.advantage={keys.advantage} has none; set "
                'rl.advantage to "gae", or leave it out'
            )
