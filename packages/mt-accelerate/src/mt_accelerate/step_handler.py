"""The train step in use: the program's own, or that of the model's family where the program replaces a part of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.train_steps import (
    AbstractTrainStep,
    BertTrainStep,
    ClassificationTrainStep,
    GetBatch,
    GPTTrainStep,
    T5TrainStep,
)
from mt_core.config.metrics import configured_loss
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost

STEPS = {"bert": BertTrainStep, "t5": T5TrainStep}
"""Model family -> its train step; others have that of classifiers, or of GPT."""
REPLACEMENTS = ("custom_train_step_class", "custom_get_batch_function", "custom_loss_function")
SPECIAL_IDS = ("decoder_start_token_id", "pad_token_id", "eos_token_id")


def build_handler(
    config: Config, plugin: MegatronLMPlugin, accelerator: Any, external: Mapping[str, Any], host: PluginHost
) -> AbstractTrainStep | None:
    """None where the engine's own loss is trained on. external: the config.json of the program's model.

    Raises ConfigError for a class that is no train step, and for a mean of micro-batches' means that the family's step
    does not compute.
    """
    # A wrapped loss needs logits and waits for the device: it is used only if the program changes something.
    if plugin.calculate_per_token_loss and all(getattr(plugin, name) is None for name in REPLACEMENTS):
        return None
    kind: Any = plugin.custom_train_step_class or _family_step(config, host)
    if not issubclass(kind, AbstractTrainStep):
        raise ConfigError(f"custom_train_step_class={kind.__name__} is no subclass of AbstractTrainStep")
    handler: Any = kind(_arguments(config, external), **(plugin.custom_train_step_kwargs or {}))
    handler.get_batch = batch_function(handler, plugin, accelerator)
    # Attributes that forward steps read, so that a function of the program replaces one part of the family's step.
    handler.loss_func = plugin.custom_loss_function or _called(handler.get_loss_func, accelerator)
    assert isinstance(handler, AbstractTrainStep)
    return handler


def _family_step(config: Config, host: PluginHost) -> type[AbstractTrainStep]:
    is_classifier = configured_loss(config, host).name in ("classification", "regression")
    return STEPS.get(config.model.family, ClassificationTrainStep if is_classifier else GPTTrainStep)


def batch_function(handler: AbstractTrainStep, plugin: MegatronLMPlugin, accelerator: Any) -> GetBatch:
    """The program's own, else that of the step."""
    given: GetBatch | None = plugin.custom_get_batch_function
    return given or _called(handler.get_batch_func, accelerator, plugin.megatron_dataset_flag)


def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    """With as many of the arguments as it takes: in Accelerate's documents these methods have none."""
    return method(*arguments[: len(signature(method).parameters)])


def _arguments(config: Config, external: Mapping[str, Any]) -> Namespace:
    """All keys as attributes, as Megatron's arguments; and the ids of special tokens of the transformers model."""
    ids = {name: external.get(name) for name in SPECIAL_IDS}
    keys = {key: value for section in config.to_dict().values() for key, value in dict(section).items()}
    return Namespace(**ids, **keys)
