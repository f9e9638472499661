"""Predictions of a trained model for files of a task, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_core.config.layers import Layer, merge_layers
from mt_core.config.schema import AUTO_LOSS, Config
from mt_core.config.sections import build_sections
from mt_core.data.building import build_datasets
from mt_core.data.loader import BatchReader
from mt_core.errors import ConfigError, DataError, Problems
from mt_core.interfaces import Dataset
from mt_core.nn.loss import Loss
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import LOSSES, MODELS, Metric
from mt_core.train.auto_choices import with_loss
from mt_core.train.predictions import Predictions, predict
from mt_core.train.trained_model import TrainedModel, load_trained_model
from mt_core.train.validation import configured_metrics, scores
from mt_data.datasets.config import BlendEntry
from mt_eval.classification.predictions import SetPredictions

OnBatch = Callable[[int], None]
"""(number of samples that are done)."""
SOURCES = {
    "data_path": None,
    "split": None,
    "train_data_path": None,
    "valid_data_path": None,
    "valid_data_paths": None,
    "data_args_path": None,
    "per_split_data_args_path": None,
}
"""Keys of [data] that name the files of training."""


class TrainedClassifier:
    """A model with a head that chooses. In a layout of several ranks, every rank has one; methods are collective.

    task: a data.dataset_type; None: that of its training. settings: section -> key -> value in place of the
    checkpoint's, for all sections. config: of evaluations, whose data section has the keys of the task and no files.
    Raises ConfigError for a model that cannot do the task.
    """

    def __init__(
        self,
        path: str | Path,
        host: PluginHost,
        *,
        task: str | None = None,
        device: str = "auto",
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        settings = settings or {}
        # [data] is not the checkpoint's: its files may not exist here, and its keys are those of the training.
        others = {name: values for name, values in settings.items() if name != "data"}
        self.host = host
        self.trained: TrainedModel = load_trained_model(path, host, device=device, settings=others)
        _require_choice(self.trained.config, path)
        keys = _data_keys(self.trained.config, task, path) | dict(settings.get("data", {}))
        self.config = _evaluation_config(self.trained.config, keys, host)
        self._loss: Loss = host[LOSSES].get(self.config.train.loss).build.load()(self.config, self.trained.ctx)

    @property
    def ctx(self) -> ParallelContext:
        return self.trained.ctx

    @property
    def metrics(self) -> dict[str, Metric]:
        """Those of the task, or of train.eval_metrics."""
        return configured_metrics(self.config, self.host)

    def dataset(self, file: str) -> Dataset:
        """All samples of a file (a folder of RACE). Raises DataError for one without samples."""
        data = self.config.data.model_copy(update={"test_data_path": [BlendEntry(prefix=file)]})
        # full_validation: every sample once, whatever train.eval_iters is.
        train = self.config.train.model_copy(update={"full_validation": True})
        config = self.config.model_copy(update={"data": data, "train": train})
        datasets = build_datasets(config, self.trained.tokenizer, "test", self.host)
        if not datasets:
            raise DataError(f"{file} has no samples")
        return datasets["test"]

    def predict(self, dataset: Dataset, on_batch: OnBatch = lambda done: None) -> Predictions:
        """The outputs for each sample, on every rank."""
        steps = _steps(dataset, self.config.train.micro_batch_size, self.ctx, on_batch)
        return predict(self.trained.model, steps, self._loss, len(dataset), self.ctx)


def _evaluation_config(trained: Config, keys: Mapping[str, Any], host: PluginHost) -> Config:
    """keys: of the section [data]. Raises ConfigError for a task without labels, and one that the model cannot do."""
    # Built apart from the rest, since the other sections are the checkpoint's, which have been checked.
    data = build_sections(["data"], merge_layers([Layer("mt eval", {"data": keys})]), host, Problems())["data"]
    config = trained.model_copy(update={"data": data})
    if not config.data.metrics:
        raise ConfigError(
            f"--task {config.data.dataset_type}: its samples have no label to choose; it can be mnli, qqp, race, "
            "another of GLUE, or text_classification"
        )
    # A loss that was chosen at training names one task; auto is resolved by the head's outputs.
    if config.train.loss == AUTO_LOSS:
        predicts_number = getattr(config.model, "num_classes", None) == 1
        config = with_loss(config, "regression" if predicts_number else "classification")
    # The family's own check, such as the number of classes against the task's labels.
    check = host[MODELS].get(config.model.family).check
    if check is not None:
        check.load()(config)
    return config


def _require_choice(config: Config, path: str | Path) -> None:
    family = config.model.family
    if not family.endswith(("_classification", "_multiple_choice")):
        raise ConfigError(
            f"{path} has a model of the family {family}, which has no head that chooses; finetune it first: mt train "
            f"--preset mnli-bert-base --set checkpoint.load={path}"
        )


def _data_keys(config: Config, task: str | None, path: str | Path) -> dict[str, Any]:
    """Keys of the section [data]: those of the training, without its files, or the defaults of another task."""
    if task is None and not config.data.metrics:
        raise ConfigError(f"{path} does not say on which task it was trained; give --task mnli, qqp, race or another")
    if task is None or task == config.data.dataset_type:
        stored = config.data.model_dump(mode="json")
        return {**stored, **{key: value for key, value in SOURCES.items() if key in stored}}
    return {"dataset_type": task, "seq_length": config.data.seq_length}


def _steps(
    dataset: Dataset, micro_size: int, ctx: ParallelContext, on_batch: OnBatch
) -> Iterator[tuple[Sequence[range], list[dict[str, Tensor]]]]:
    # The last step may be smaller: no sample is repeated to fill it.
    count, size = len(dataset), micro_size * ctx.dp.size
    steps = [(first, min(size, count - first)) for first in range(0, count, size)]
    # The reader takes this rank's samples of each step; `rank_batch.samples` says which they are.
    reader = BatchReader(dataset, steps, micro_size=micro_size, dp_rank=ctx.dp.rank, dp_size=ctx.dp.size, workers=1)
    for (first, taken), rank_batch in zip(steps, reader, strict=True):
        arrays = rank_batch.micro_batches
        yield (
            rank_batch.samples,
            [{k: torch.from_numpy(v).to(ctx.device) for k, v in batch.items()} for batch in arrays],
        )
        on_batch(first + taken)


def of_set(predictions: Predictions) -> SetPredictions:
    """In the order of their uids."""
    # Ranks predict interleaved samples; uids restore one order whatever the layout. stable: a uid may occur twice.
    order = predictions.fields["uid"].argsort(stable=True)
    fields = {name: field[order].numpy() for name, field in predictions.fields.items()}
    return SetPredictions(
        fields["uid"],
        predictions.outputs[order].numpy(),
        fields["labels"],
        fields["loss_mask"] > 0,
        fields["truncated"] > 0,
    )


def scores_of(predictions: Predictions, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Loss and metrics of the samples with a label; nothing where none has one."""
    return scores(predictions, metrics) if bool((predictions.fields["loss_mask"] > 0).any()) else {}
