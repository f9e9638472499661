"""Samples of a data set or of a text, as micro-batches of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mt_core.config.schema import Config
from mt_core.data.building import build_datasets
from mt_core.data.loader import collate, micro_batch_samples
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Dataset, Split, Tokenizer
from mt_core.nn.model import contract
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.step.batches import own_positions, with_positions
from mt_core.train.step.forward_backward import Batch

Samples = Sequence[Mapping[str, np.ndarray]]


def samples_of_text(file: Path, tokenizer: Tokenizer, length: int, number: int | None) -> Samples:
    """The text from its beginning in samples of `length` tokens. number: of samples; None: all.

    Raises DataError for a file that cannot be read, and a text that is too short.
    """
    try:
        ids = tokenizer.encode(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as text: {error}") from error
    complete = len(ids) // length
    if complete < (number or 1):
        raise DataError(
            f"{file} has {len(ids)} tokens, which are {complete} samples of {length}; {number or 1} are needed: give a "
            "longer text, or lower --samples or --seq-length"
        )
    cut = np.array(ids[: (number or complete) * length], dtype=np.int64).reshape(-1, length)
    return [_sample(tokens) for tokens in cut]


def _sample(tokens: np.ndarray) -> Mapping[str, np.ndarray]:
    """The last token has none to predict."""
    mask = np.ones(len(tokens), dtype=np.float32)
    mask[-1] = 0.0
    return {"tokens": tokens, "labels": np.append(tokens[1:], tokens[-1:]), "loss_mask": mask}


def samples_of_split(config: Config, tokenizer: Tokenizer, host: PluginHost, split: Split, number: int) -> Samples:
    """The first samples of the configured data set (section [data]). Raises DataError when it has fewer."""
    # An evaluation takes whole batches: as many steps as there are samples.
    train: dict[str, int | None] = {
        "train_iters": number,
        "eval_iters": number,
        "global_batch_size": 1,
        "micro_batch_size": 1,
    }
    train |= {"train_samples": None, "train_epochs": None, "rampup_batch_size": None}
    wanted = config.model_copy(update={"train": config.train.model_copy(update=train)})
    built = build_datasets(wanted, tokenizer, split, host)
    if not built:
        raise DataError(f"data.dataset_type={config.data.dataset_type} has no samples of the split {split}")
    dataset: Dataset = next(iter(built.values()))
    if len(dataset) < number:
        raise DataError(f"the split {split} of the data set has {len(dataset)} samples, and {number} are needed")
    return [dataset[index] for index in range(number)]


def rank_batches(samples: Samples, micro_batch_size: int, ctx: ParallelContext) -> list[Batch]:
    """This rank's micro-batches, on the device. Raises ConfigError for samples that ranks cannot share equally."""
    unit = ctx.dp.size * micro_batch_size
    if len(samples) % unit:
        raise ConfigError(
            f"{len(samples)} samples are no multiple of {ctx.dp.size} data-parallel ranks times "
            f"{micro_batch_size} samples in a micro-batch; change --samples, --eval-samples or --micro-batch-size"
        )
    numbers = micro_batch_samples(0, len(samples), micro_batch_size, ctx.dp.rank, ctx.dp.size)
    return [_on_device([samples[number] for number in group], ctx) for group in numbers]


def _on_device(samples: Samples, ctx: ParallelContext) -> Batch:
    arrays = collate(samples)
    whole = arrays if ctx.cp.size == 1 else with_positions(arrays)
    return {name: own_positions(torch.from_numpy(array), ctx.cp).to(ctx.device) for name, array in whole.items()}


def inputs_of(model: nn.Module, batch: Batch) -> Batch:
    """The fields that the model takes."""
    return {name: batch[name] for name in contract(model).inputs if name in batch}
