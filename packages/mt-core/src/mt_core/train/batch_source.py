"""Sources of batches with a state of their own, in place of a data set whose samples are numbers alone."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Protocol

from mt_core.data.loader import RankBatch
from mt_core.errors import CheckpointError
from mt_core.interfaces import Dataset
from mt_core.specs import BATCH_SOURCES
from mt_core.train.callbacks import Run


class TrainingRun(Run, Protocol):
    """The part of the running `Trainer` that sources of batches may use."""

    train_data: Dataset
    valid_data: Mapping[str, Dataset]


class BatchSource:
    """The batches of the data set. A source of a plugin inherits from it and overrides what it changes.

    All methods are called on all ranks, in the same order, so that they may be collective. A batch has as many
    micro-batches on every data-parallel rank, and the ranks that share a model have the same ones.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run

    def batches(self) -> Generator[RankBatch, None, None]:
        """One batch for each remaining step (`engine.remaining_steps`), each requested after the step before it was
        launched. It may end early, which ends training."""
        engine = self.run.engine
        batches = engine.read_batches(self.run.train_data, engine.remaining_steps())
        try:
            for batch in batches:
                yield self.complete(batch)
        finally:
            batches.close()

    def complete(self, batch: RankBatch) -> RankBatch:
        """The batch with the fields that the loss needs and no data set has; also called for batches of validation."""
        return batch

    def state_dict(self) -> Mapping[str, Any]:
        """JSON values that the checkpoint of the current step keeps; those of rank 0 count."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` had returned, before the first batch of a resumed run."""

    def close(self) -> None:
        """Called last, also after an error."""


class DatasetBatches(BatchSource):
    """`dataset`: the batches as the data set has them, which follow from consumed samples alone. That of the next step
    is copied to the device while a step runs; a source whose batches depend on the weights cannot do that."""

    def batches(self) -> Generator[RankBatch, None, None]:
        return self.run.engine.train_batches(self.run.train_data)


def configured_batch_source(run: TrainingRun) -> BatchSource:
    """The source that train.batch_source names, built. Batches of validation go through its `complete` from now on."""
    name = run.config.train.batch_source
    source: BatchSource = run.host[BATCH_SOURCES].get(name, key="train.batch_source").build.load()(run)
    if type(source).complete is not BatchSource.complete:
        run.engine.complete_batch = source.complete
    return source


def stored_state(source: BatchSource) -> dict[str, Any]:
    """The entry of a checkpoint's metadata; none for a source without state. Collective."""
    state = source.state_dict()
    return {"batch_source": dict(state)} if state else {}


def restore_source(source: BatchSource, metadata: Mapping[str, Any], origin: str) -> None:
    """Raises CheckpointError for the checkpoint of a run whose source had no state, where this one has."""
    if "batch_source" in metadata:
        source.load_state_dict(metadata["batch_source"])
    elif source.state_dict():
        raise CheckpointError(
            f"{origin} has no state of a source of batches, so that this run cannot go on from it; start a new run "
            "with checkpoint.load"
        )
