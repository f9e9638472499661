"""The engine for what a program gave to `Accelerator.prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from mt_accelerate.megatron_lm.configuration import data_parallel_size, dataset_section, training_sections
from mt_accelerate.megatron_lm.data_loaders import MegatronLMDummyDataLoader, micro_batch_size, require_splittable
from mt_accelerate.megatron_lm.engine import MegatronEngine
from mt_accelerate.megatron_lm.optimizers import undecayed_names
from mt_accelerate.megatron_lm.schedulers import MegatronLMDummyScheduler, schedule_sections
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.operations import from_first_rank
from mt_accelerate.state import AcceleratorState
from mt_ckpt.hugging_face.reader import read_module
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS

# -- `Prepared`: objects given to `Accelerator.prepare`, sorted by kind ------------------------------


@dataclass
class Prepared:
    """dummy: the MegatronLMDummyDataLoader, which was given three times."""

    model: Any
    optimizer: Any
    scheduler: Any
    loaders: list[DataLoader[Any]]
    dummy: MegatronLMDummyDataLoader | None

    @classmethod
    def of(cls, objects: tuple[Any, ...]) -> Prepared:
        """Raises ConfigError for no model or several, no optimizer or several, and what cannot be prepared."""
        models = [value for value in objects if isinstance(value, nn.Module)]
        loaders = [value for value in objects if isinstance(value, DataLoader)]
        dummies = [value for value in objects if isinstance(value, MegatronLMDummyDataLoader)]
        kinds = (nn.Module, DataLoader, MegatronLMDummyDataLoader)
        # By their attributes: optimizers and schedulers of other packages need no common base class.
        others = [value for value in objects if not isinstance(value, kinds)]
        optimizers = [value for value in others if hasattr(value, "param_groups")]
        schedulers = [value for value in others if value not in optimizers and _is_scheduler(value)]
        _require_one("model", models)
        _require_one("optimizer", optimizers)
        _require_no_more(schedulers[1:] + [other for other in others if other not in (*optimizers, *schedulers)])
        _require_same_optimizer(next(iter(schedulers), None), optimizers[0])
        _require_data(loaders, dummies)
        if not hasattr(getattr(models[0], "config", None), "to_dict"):
            raise ConfigError(f"the model is a {type(models[0]).__name__}, which has no config of transformers")
        return cls(models[0], optimizers[0], next(iter(schedulers), None), loaders, next(iter(dummies), None))


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, MegatronLMDummyScheduler) or (hasattr(value, "step") and hasattr(value, "get_last_lr"))


def _require_one(kind: str, objects: list[Any]) -> None:
    if len(objects) != 1:
        raise ConfigError(f"prepare needs one {kind} with Megatron-LM, and was given {len(objects)}")


def _require_no_more(objects: list[Any]) -> None:
    if objects:
        raise ConfigError(f"prepare cannot take this {type(objects[0]).__name__} beside the others")


def _require_same_optimizer(scheduler: Any, optimizer: Any) -> None:
    if scheduler is None or isinstance(scheduler, MegatronLMDummyScheduler):
        return
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise ConfigError(
            f"the {type(scheduler).__name__} sets the rates of another optimizer than the {type(optimizer).__name__} "
            "that is prepared with it; make it with this one"
        )


def _require_data(loaders: list[DataLoader[Any]], dummies: list[MegatronLMDummyDataLoader]) -> None:
    if dummies and (len(dummies) != 3 or len({id(dummy) for dummy in dummies}) != 1 or loaders):
        raise ConfigError("give one MegatronLMDummyDataLoader three times: for training, validation and test")
    if not dummies and not loaders:
        raise ConfigError("prepare needs a DataLoader beside the model: its batch_size is the micro-batch's")
    for loader in loaders:
        require_splittable(loader)


MODEL_OPTIONS = ("attention_dropout", "hidden_dropout", "position_embedding_type")
"""Keys of [model] that fields of the plugin set or contradict, in families that have them."""


def build_engine(program: Prepared, state: AcceleratorState, accelerator: Any, host: PluginHost) -> MegatronEngine:
    """Collective. accelerator: passed to the program's train step. Raises ConfigError for a model without a name map,
    and for an optimizer, a scheduler or a field of the plugin that cannot be followed."""
    # Order of collectives on every rank: weights, then the seed, then what MegatronEngine builds.
    _share_weights(program.model)
    plugin, reader = state.megatron_lm_plugin, read_module(program.model, host)
    assert plugin is not None  # without one the program's own modules run (without_plugin)
    size, dp = _micro_batch_size(program, plugin), data_parallel_size(plugin)
    plugin.set_global_batch_size(size * plugin.num_micro_batches * dp)
    sections = reader.metadata["config"]
    configured = training_sections(
        {**sections["model"], **_options_of_family(reader, host)},
        sections["tokenizer"],
        plugin,
        program.optimizer,
        undecayed_names(program.model, program.optimizer.param_groups, host),
        mixed_precision=state.mixed_precision,
        micro_batch_size=size,
        dp_size=dp,
        # Programs may seed every process differently; a run has one seed, the first rank's.
        seed=from_first_rank(torch.initial_seed() % 2**31),
        device=state.device.type,
        schedule=schedule_sections(plugin, program.scheduler, dp, _steps_of_epoch(program, plugin)),
        data=data_section(program, plugin, sections["model"]["family"]),
    )
    # Checks of the layout read WORLD_SIZE, which is not set where the program has joined its processes itself.
    with as_world(state.num_processes):
        loaded = load_config(sections=configured, host=host)
    engine = MegatronEngine(loaded, plugin, reader, program.model.config.to_dict(), accelerator, host)
    # Of training alone: the plugin has refused numbers for validation and test.
    counters = engine.engine.state
    counters.consumed_samples = counters.schedule_samples = (plugin.consumed_samples or [0])[0]
    return engine


def _share_weights(model: nn.Module) -> None:
    """Every rank gets the first rank's weights: programs need not seed them alike. In place."""
    if dist.is_initialized():
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)


def _micro_batch_size(program: Prepared, plugin: MegatronLMPlugin) -> int:
    if program.dummy is not None:
        return int(program.dummy.dataset_args.get("micro_batch_size", 1))
    return micro_batch_size(program.loaders, plugin.is_train_batch_min)


def _steps_of_epoch(program: Prepared, plugin: MegatronLMPlugin) -> int | None:
    """Steps of an epoch of the first loader's data; None for data sets of mt."""
    if not program.loaders:
        return None
    # The first loader is that of training, as Accelerate takes it.
    return max(len(program.loaders[0].dataset) // (plugin.global_batch_size or 1), 1)  # type: ignore[arg-type]


def data_section(program: Prepared, plugin: MegatronLMPlugin, family: str) -> dict[str, Any]:
    """[data]. Raises ConfigError for a length of the decoder beside data that has none."""
    length = plugin.seq_length or plugin.encoder_seq_length
    decoder = plugin.decoder_seq_length
    if decoder is not None and (program.dummy is None or family != "t5"):
        raise ConfigError(
            f"MegatronLMPlugin(decoder_seq_length={decoder}) is of T5's data sets (MegatronLMDummyDataLoader); a "
            f"DataLoader's batches have their own lengths, and model.family={family} is none of T5's otherwise"
        )
    if program.dummy is None:
        length = length or _length_of_samples(program)
    lengths = {"seq_length": length, "decoder_seq_length": decoder, "eod_mask_loss": plugin.eod_mask_loss or None}
    keys = {key: value for key, value in lengths.items() if value is not None}
    if program.dummy is None:
        return keys
    # Before the train step is built, which passes it to get_batch_func.
    plugin.megatron_dataset_flag = True
    return {**dataset_section(program.dummy.dataset_args, family), **keys}


def _length_of_samples(program: Prepared) -> int:
    loader = program.loaders[0]
    # The first sample as a batch: its length is known only after padding.
    return int(loader.collate_fn([loader.dataset[0]])["input_ids"].shape[1])


def _options_of_family(reader: CheckpointReader, host: PluginHost) -> Mapping[str, Any]:
    """The MODEL_OPTIONS that the family has, with the model's own values."""
    section = reader.metadata["config"]["model"]
    config_type: Any = host[MODELS].get(section["family"]).config_type.load()
    fields = config_type.model_fields
    # A section read from a transformers model leaves out what has its default.
    return {name: section.get(name, fields[name].default) for name in MODEL_OPTIONS if name in fields}
