"""This rank's batches of a program's DataLoader, as Accelerate divides them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from mt_accelerate.handlers import DataLoaderConfiguration
from mt_accelerate.operations import find_batch_size, from_first_rank, send_to_device, slice_tensors
from mt_accelerate.state import GradientState
from mt_core.errors import ConfigError
from mt_core.parallel.context import Axis


class RankBatches(BatchSampler):
    """The index lists of one rank. Every rank follows the order that the first one draws."""

    def __init__(self, sampler: Any, ranks: Axis, config: DataLoaderConfiguration) -> None:
        # No call of BatchSampler's: it requires a sampler of single indices, and programs give batch samplers.
        self.sampler: Any = sampler
        self.ranks, self.config = ranks, config
        self._even_batches: bool | None = None
        self.batch_size: int | None = getattr(sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(sampler, "drop_last", False))
        size, count = self.batch_size, ranks.size
        if config.split_batches and count > 1 and (size is None or size % count):
            raise ConfigError(
                f"split_batches=True: a batch_size of {size} is no multiple of the {count} processes; change it, or "
                "leave split_batches out"
            )

    @property
    def even_batches(self) -> bool:
        """Whether the last batches are filled up; programs set it for one loader, else the configuration says it."""
        return self.config.even_batches if self._even_batches is None else self._even_batches

    @even_batches.setter
    def even_batches(self, value: bool | None) -> None:
        self._even_batches = value

    def __len__(self) -> int:
        whole, size = len(self.sampler), self.ranks.size
        if self.config.split_batches:
            return whole
        full, more = divmod(whole, size)
        if self.drop_last or not more:
            return full
        return full + 1 if self.even_batches else full + (self.ranks.rank < more)

    def __iter__(self) -> Iterator[list[int]]:
        if self.ranks.size == 1:
            yield from self.sampler
            return
        # A random sampler draws from each process's generator. Collective, when the loop takes its first batch.
        batches: list[list[int]] = from_first_rank(list(self.sampler) if self.ranks.rank == 0 else [])
        if not self.config.split_batches and self.drop_last:
            batches = batches[: len(batches) // self.ranks.size * self.ranks.size]
        if self.even_batches and not self.drop_last:
            batches = self._filled_up(batches)
        yield from (self._part(batches) if self.config.split_batches else batches[self.ranks.rank :: self.ranks.size])

    def _filled_up(self, batches: list[list[int]]) -> list[list[int]]:
        """Full batches, as many as all ranks need: the last ones are filled up from the beginning of the data."""
        order = [index for batch in batches for index in batch]
        if not order:
            return batches
        size = self.batch_size or len(batches[0])
        count = len(batches) if self.config.split_batches else -(-len(batches) // self.ranks.size) * self.ranks.size
        if len(batches) == count and len(batches[-1]) == size:
            return batches
        if self.batch_size is None:
            # Batches of several lengths: whole ones are repeated.
            return batches + [batches[number % len(batches)] for number in range(count - len(batches))]
        numbers = [order[position % len(order)] for position in range(count * size)]
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    def _part(self, batches: list[list[int]]) -> Iterator[list[int]]:
        size = (self.batch_size or 0) // self.ranks.size
        for batch in batches:
            part = batch[self.ranks.rank * size : (self.ranks.rank + 1) * size]
            if part:
                yield part


class RankSamples(IterableDataset[Any]):
    """This rank's samples of an iterable data set, in blocks of a batch. Every rank reads all of them."""

    def __init__(self, dataset: Any, size: int, ranks: Axis, *, drop_last: bool) -> None:
        self.dataset, self.size, self.ranks, self.drop_last = dataset, size, ranks, drop_last

    def __len__(self) -> int:
        block, whole = self.size * self.ranks.size, len(self.dataset)
        return (whole // block if self.drop_last else -(-whole // block)) * self.size

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        block: list[Any] = []
        first: list[Any] = []
        rank_slice = slice(self.ranks.rank * self.size, (self.ranks.rank + 1) * self.size)
        for sample in self.dataset:
            block.append(sample)
            if len(block) == self.size * self.ranks.size:
                yield from block[rank_slice]
                first, block = first or block, []
        if block and not self.drop_last:
            # Filled up from the beginning, so that every rank has as many batches.
            source = first or list(block)
            while len(block) < self.size * self.ranks.size:
                block += source[: self.size * self.ranks.size - len(block)]
            yield from block[rank_slice]


class PreparedLoader:
    """A DataLoader's batches of this rank, on its device, one ahead. It has the attributes of the program's loader.

    remainder: samples of the last global batch that are no repetitions; 0 if it is full, -1 if it is not known.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        ranks: Axis,
        device: torch.device | None,
        state: GradientState,
        config: DataLoaderConfiguration,
    ) -> None:
        self.base_dataloader, self.device, self.gradient_state, self.config = loader, device, state, config
        self._ranks = ranks
        self._loader = self._of_rank(loader)
        self._skip = self.iteration = 0
        self.at_end = False

    def _of_rank(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        _seed_sampler(loader, self.config)
        if self._ranks.size == 1:
            return loader
        common = {
            "num_workers": loader.num_workers,
            "collate_fn": loader.collate_fn,
            "pin_memory": loader.pin_memory,
            "worker_init_fn": loader.worker_init_fn,
            "persistent_workers": loader.persistent_workers,
        }
        if isinstance(loader.dataset, IterableDataset):
            if loader.batch_size is None:
                raise ConfigError("a DataLoader of an IterableDataset needs a batch_size to be divided over processes")
            size = loader.batch_size // self._ranks.size if self.config.split_batches else loader.batch_size
            samples = RankSamples(loader.dataset, size, self._ranks, drop_last=loader.drop_last)
            return DataLoader(samples, batch_size=size, drop_last=loader.drop_last, **common)  # type: ignore[arg-type]
        sampler = loader.batch_sampler
        if sampler is None:
            # batch_size=None: the sampler gives batches, and the data set is asked for each at once.
            batches = RankBatches(loader.sampler, self._ranks, self.config)
            return DataLoader(loader.dataset, batch_size=None, sampler=batches, **common)  # type: ignore[arg-type]
        batches = RankBatches(sampler, self._ranks, self.config)
        return DataLoader(loader.dataset, batch_sampler=batches, **common)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # What is not of the division: dataset, collate_fn, num_workers. `_loader` itself is missing while unpickling.
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def total_batch_size(self) -> int:
        """Samples of a batch over all ranks."""
        size = self.base_dataloader.batch_size or getattr(self.base_dataloader.batch_sampler, "batch_size", None) or 1
        return int(size) * (1 if self.config.split_batches else self._ranks.size)

    @property
    def total_dataset_length(self) -> int:
        return len(self.base_dataloader.dataset)  # type: ignore[arg-type]

    @property
    def remainder(self) -> int:
        if not hasattr(self.base_dataloader.dataset, "__len__"):
            return -1
        return 0 if self.base_dataloader.drop_last else self.total_dataset_length % self.total_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of samplers and data sets that follow it."""
        self.iteration = epoch
        followers: tuple[Any, ...] = (
            self.base_dataloader.sampler,
            self.base_dataloader.batch_sampler,
            self._loader.dataset,
        )
        for follower in followers:
            if hasattr(follower, "set_epoch"):
                follower.set_epoch(epoch)

    def skipped(self, count: int) -> PreparedLoader:
        """The same batches without the first ones, in the next epoch."""
        shortened = PreparedLoader(self.base_dataloader, self._ranks, self.device, self.gradient_state, self.config)
        shortened._skip = count
        if isinstance(self.batch_sampler, RankBatches):
            shortened.batch_sampler.even_batches = self.batch_sampler._even_batches
        return shortened

    def get_sampler(self) -> Any:
        """What draws the order of the program's samples."""
        return self.base_dataloader.sampler

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the loop has the last batch."""
        return self.at_end

    def __len__(self) -> int:
        return max(len(self._loader) - self._skip, 0)

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        self.at_end = False
        active = self.gradient_state.dataloader_references
        active.append(self)
        try:
            batches = self._numbered()
            # One ahead: whether a batch is the last is known before it is given out.
            current = next(batches, None)
            while current is not None:
                following = next(batches, None)
                self.at_end = following is None
                yield self._on_device(current[1])
                current = following
        finally:
            active.remove(self)
        self.iteration += 1
        self._skip = 0

    def _numbered(self) -> Iterator[tuple[int, Any]]:
        return (pair for pair in enumerate(self._loader) if pair[0] >= self._skip)

    def _on_device(self, batch: Any) -> Any:
        if self.device is None:
            return batch
        return send_to_device(batch, self.device, non_blocking=self.config.non_blocking)


class SeededOrder(RandomSampler):
    """A random order that follows from a seed and the epoch alone."""

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        super().__init__(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler.num_samples,
            generator=torch.Generator(),
        )
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


def _seed_sampler(loader: DataLoader[Any], config: DataLoaderConfiguration) -> None:
    """In place: the program's loader follows the seed, too, so that it can be compared with."""
    if not config.use_seedable_sampler or not isinstance(loader.sampler, RandomSampler):
        return
    if isinstance(loader.sampler, SeededOrder):
        return
    seed = torch.initial_seed() if config.data_seed is None else config.data_seed
    ordered = SeededOrder(loader.sampler, int(seed) % 2**63)
    # A DataLoader refuses new samplers after construction, except within its batch sampler.
    if isinstance(loader.batch_sampler, BatchSampler):
        loader.batch_sampler.sampler = ordered


def rows_without_repetitions(value: Any, loader: PreparedLoader | None) -> Any:
    """Rows of what was gathered in the last batch of a loader, without those that filled it up."""
    if loader is None or not loader.at_end or loader.remainder <= 0:
        return value
    rows = find_batch_size(value)
    return value if rows is None or rows <= loader.remainder else slice_tensors(value, slice(0, loader.remainder))
