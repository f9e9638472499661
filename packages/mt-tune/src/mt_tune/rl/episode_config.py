"""The environments of a run, by rl.environments and rl.tools."""

from __future__ import annotations

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_core.plugins import PluginHost
from mt_core.train.batch_source import TrainingRun
from mt_data.datasets.sft.chat_templates import NoChatTemplateError
from mt_tune.environments.pool import DialoguePool, DialogueProcesses, DialoguesHere
from mt_tune.environments.setup import source_setup
from mt_tune.environments.turns import TurnEncoder
from mt_tune.rewards.config import RewardsConfig
from mt_tune.rl.config import RLConfig, prompt_data
from mt_tune.rl.episodes import EpisodeLimits, Episodes
from mt_tune.rl.prompts import prompt_template, prompts_of


def configured_episodes(config: Config, tokenizer: Tokenizer, host: PluginHost) -> Episodes | None:
    """None for a run without environments and tools. Processes are started, and have imported the code.

    Raises ConfigError for code that is not known or cannot be imported, and a missing template.
    """
    keys, rewards = config.section(RLConfig), config.section(RewardsConfig)
    if not keys.has_environment:
        return None
    encoder = turn_encoder(config, tokenizer)
    limits = EpisodeLimits(
        keys.max_turns, keys.max_completion_length, config.data.seq_length, rewards.on_failure == "skip"
    )
    return Episodes(dialogue_pool(keys, rewards, host), encoder, limits)


def dialogue_pool(keys: RLConfig, rewards: RewardsConfig, host: PluginHost) -> DialoguePool:
    setup = source_setup(keys.environments, keys.tools, keys.environment_options, rewards.modules, host)
    if not keys.environment_processes:
        return DialoguesHere(setup)
    return DialogueProcesses(
        setup,
        most=keys.environment_processes,
        deadline_seconds=keys.environment_deadline_seconds,
        memory_mb=rewards.memory_mb,
    )


def turn_encoder(config: Config, tokenizer: Tokenizer) -> TurnEncoder:
    template = prompt_template(prompt_data(config), tokenizer)
    if isinstance(template, NoChatTemplateError):
        raise template
    return TurnEncoder(template, tokenizer, keep_dropped_turns=config.section(RLConfig).keep_dropped_turns)


def require_messages(run: TrainingRun) -> None:
    """Raises ConfigError for prompts that are texts, where the run has environments or tools."""
    if not run.config.section(RLConfig).has_environment:
        return
    for dataset in (run.train_data, *run.valid_data.values()):
        for prompt in prompts_of(dataset):
            if isinstance(prompt.content, str):
                raise ConfigError(
                    f"{prompt.where}: the prompt is a text, and conversations with environments and tools have "
                    'messages; set data.prompt_format="user_message" to make texts messages of a user'
                )
