"""Batches of a data-parallel rank from a program's torch DataLoader, and Megatron's data sets by their paths."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from mt_accelerate.megatron_lm.engine import MegatronEngine
from mt_accelerate.operations import on_first_rank, send_to_device
from mt_accelerate.state import GradientState
from mt_core.data import building
from mt_core.data.loader import micro_batch_samples
from mt_core.errors import ConfigError
from mt_core.interfaces import Dataset
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train import Engine


class MegatronLMDummyDataLoader:
    """Data sets that mt builds. dataset_kwargs: data_path (or a list), split or splits_string, seq_length,
    micro_batch_size, and any other key of [data]. Given to `prepare` three times it becomes the iterators of training,
    validation and test."""

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = dataset_kwargs


class _RankOrder:
    """The indices of each batch of a rank: a batch sampler. Every rank follows the order that the first rank draws.

    even_batches: the last batch is filled up from the beginning of the data; programs set it.
    """

    def __init__(self, sampler: Any, ctx: ParallelContext, micro_size: int, global_size: int, drop_last: bool) -> None:
        self.sampler, self.ctx, self.micro_size, self.drop_last = sampler, ctx, micro_size, drop_last
        self.global_size = global_size
        self._even_batches = True

    @property
    def batch_size(self) -> int:
        """Samples of a batch of this rank."""
        return self.global_size // self.ctx.dp.size

    @property
    def even_batches(self) -> bool:
        return self._even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        if not value and self.ctx.dp.size > 1:
            warnings.warn(
                f"even_batches=False: {self.ctx.dp.size} data-parallel ranks of Megatron-LM need as many samples each, "
                "so that the last batch is filled up; gather_for_metrics leaves the repetitions out",
                stacklevel=2,
            )
        self._even_batches = bool(value)

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.global_size)
        return full + bool(rest and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        # A random sampler draws from each process's generator, and ranks that share a model must read the
        # same samples. Collective, when the loop takes its first batch.
        order = on_first_rank(lambda: list(self.sampler))
        for start in range(0, len(self) * self.global_size, self.global_size):
            # dp = 2, 2 micro-batches of 1: rank 0 has samples 0 and 2 of a global
            # batch, rank 1 has 1 and 3, as in `mt train`.
            groups = micro_batch_samples(start, self.global_size, self.micro_size, self.ctx.dp.rank, self.ctx.dp.size)
            indices = [index for group in groups for index in group]
            if not self._even_batches and self.ctx.dp.size == 1:
                yield [order[index] for index in indices if index < len(order)]
            else:
                # The last batch is filled up from the beginning, as Accelerate does.
                yield [order[index % len(order)] for index in indices]


class DataParallelLoader:
    """This rank's batches of a DataLoader, on its device: num_micro_batches micro-batches each. It has the attributes
    of a DataLoader.

    remainder: samples of the last global batch that are no repetitions, 0 if it is full.
    """

    def __init__(self, loader: DataLoader[Any], engine: Engine, gradients: GradientState) -> None:
        self.ctx, self.base_dataloader, self.gradients = engine.ctx, loader, gradients
        self.batches_left = 0
        micro_size = engine.config.train.micro_batch_size
        self._order = _RankOrder(loader.sampler, engine.ctx, micro_size, engine.batch_size.full, loader.drop_last)
        self._loader = DataLoader(
            loader.dataset,
            # Sampler, batch size and drop_last of the program's loader are in the
            # order; collation and workers stay its own.
            batch_sampler=self._order,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
        )
        self.remainder = 0 if loader.drop_last else len(loader.sampler) % self.total_batch_size  # type: ignore[arg-type]
        self.at_end = False

    def __getattr__(self, name: str) -> Any:
        # What is not of the division: dataset, collate_fn, num_workers. `_loader` itself is missing while unpickling.
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the loop has the last batch."""
        return self.at_end

    @property
    def total_dataset_length(self) -> int:
        return len(self.base_dataloader.dataset)  # type: ignore[arg-type]

    def get_sampler(self) -> Any:
        """What draws the order of the program's samples."""
        return self.base_dataloader.sampler

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of a sampler and a data set that follow it."""
        for follower in (self.base_dataloader.sampler, self.base_dataloader.dataset):
            if hasattr(follower, "set_epoch"):
                follower.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int:
        """Samples of a batch over all ranks."""
        return self._order.global_size

    def kept_rows(self) -> list[int]:
        """Rows of the last batch, gathered over ranks, that are no repetitions."""
        order, dp = self._order, self.ctx.dp.size
        groups = [micro_batch_samples(0, order.global_size, order.micro_size, rank, dp) for rank in range(dp)]
        # Row i of the gathered batch is sample samples[i] of the global batch:
        # ranks end to end, not the order of the data.
        samples = [sample for of_rank in groups for group in of_rank for sample in group]
        return [row for row, sample in enumerate(samples) if sample < self.remainder]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        self.at_end = False
        active = self.gradients.dataloader_references
        active.append(self)
        try:
            for number, batch in enumerate(self._loader, 1):
                # Before the batch is given out: `gather_for_metrics` reads it in the body of the loop.
                self.at_end, self.batches_left = number == len(self), len(self) - number + 1
                yield send_to_device(batch, self.ctx.device, non_blocking=True)
        finally:
            active.remove(self)


class SkippedLoader:
    """A loader without its first batches, once."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count = loader, count

    def __len__(self) -> int:
        return max(len(self.loader) - self.count, 0)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number >= self.count:
                yield batch


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader without its first batches, once: one that was prepared, or any of a program."""
    return dataloader.skipped(num_batches) if hasattr(dataloader, "skipped") else SkippedLoader(dataloader, num_batches)


def require_splittable(loader: DataLoader[Any]) -> None:
    """Raises ConfigError for a loader whose samples cannot be given to ranks by their index."""
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"the data set {type(loader.dataset).__name__} is an IterableDataset, whose samples have no index to split "
            "them over ranks by; give one with __len__ and __getitem__"
        )
    if loader.batch_size is None:
        raise ConfigError("a DataLoader without batch_size cannot be cut into micro-batches; give it a batch_size")


def micro_batch_size(loaders: Sequence[DataLoader[Any]], smallest: bool) -> int:
    sizes = [loader.batch_size for loader in loaders if loader.batch_size is not None]
    return (min if smallest else max)(sizes)


# -- data sets of mt, for a program that gives MegatronLMDummyDataLoader -----------------------------

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
    return [
        building.build_train_data(config, tokenizer, host),
        *(next(iter(datasets.values()), None) for datasets in later),
    ]


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
        yield {
            name: torch.cat([torch.from_numpy(micro_batch[name]) for micro_batch in batch.micro_batches])
            for name in names
        }
