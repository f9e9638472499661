"""Batches of mt's data sets, for a program that gives MegatronLMDummyDataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mt_accelerate.megatron_engine import MegatronEngine
from mt_core.data import building
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_core.specs import Dataset
from mt_core.train import Engine

SPLITS = ("training", "validation", "test")


def dataset_iterators(model: MegatronEngine, host: PluginHost) -> list[Iterator[dict[str, Tensor]]]:
    """Batches of training, validation and test, of this rank. Those of training end with the run, the others repeat
    train.eval_iters global batches."""
    engine = model.engine
    provider = model.plugin.custom_megatron_datasets_provider_function
    train, *later = _provided(engine, provider) if provider is not None else _configured(engine, host)
    return [_train_batches(engine, train), *(_evaluation_batches(engine, dataset) for dataset in later)]


def _configured(engine: Engine, host: PluginHost) -> list[Dataset | None]:
    config, tokenizer = engine.config, engine.tokenizer
    later = [building.build_datasets(config, tokenizer, split, host) for split in ("valid", "test")]
    return [building.build_train_data(config, tokenizer, host), *(next(iter(one.values()), None) for one in later)]


def _provided(engine: Engine, provider: Any) -> list[Dataset | None]:
    """Raises ConfigError unless the program's function returns three data sets, of which the last two may be None."""
    evaluated = engine.config.train.eval_iters * engine.batch_size.full
    datasets = list(provider((engine.total_samples, evaluated, evaluated)))
    if len(datasets) != len(SPLITS) or datasets[0] is None:
        raise ConfigError(
            f"custom_megatron_datasets_provider_function returned {len(datasets)} data sets; it returns those of "
            f"{', '.join(SPLITS)}, of which the last two may be None"
        )
    for split, dataset in zip(SPLITS, datasets, strict=True):
        if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ConfigError(
                f"custom_megatron_datasets_provider_function: the data set of {split} is a {type(dataset).__name__} "
                "without __len__ and __getitem__"
            )
    return datasets


def _train_batches(engine: Engine, dataset: Dataset | None) -> Iterator[dict[str, Tensor]]:
    assert dataset is not None
    building.require_samples(dataset, engine.total_samples)
    yield from _batches(engine, dataset, engine.remaining_steps())


def _evaluation_batches(engine: Engine, dataset: Dataset | None) -> Iterator[dict[str, Tensor]]:
    """The same samples again and again."""
    if dataset is None:
        return
    size, count = engine.batch_size.full, engine.evaluated_samples(dataset)
    # count is 0 for an empty data set, which would be an endless loop without a batch.
    while count:
        yield from _batches(engine, dataset, [(first, min(size, count - first)) for first in range(0, count, size)])


def _batches(engine: Engine, dataset: Dataset, steps: Iterable[tuple[int, int]]) -> Iterator[dict[str, Tensor]]:
    for batch in engine.read_batches(dataset, steps):
        names = batch.micro_batches[0]
        # The engine cuts the rows into the same micro-batches again when the program calls the model with them.
        yield {name: torch.cat([torch.from_numpy(one[name]) for one in batch.micro_batches]) for name in names}
