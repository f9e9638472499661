"""The tokenizer and the data sets of a run, from its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mt_core.config.checks import global_batch_size
from mt_core.config.schema import Config
from mt_core.data.training_length import (
    EpochDataset,
    EpochsOfBlend,
    iterations_of_epoch,
    total_train_samples,
    with_train_iters,
)
from mt_core.errors import DataError
from mt_core.interfaces import Dataset, Split, SplitRequest, Tokenizer
from mt_core.plugins import PluginHost
from mt_core.specs import DATASETS, TOKENIZERS


def build_tokenizer(config: Config, host: PluginHost) -> Tokenizer:
    name = config.tokenizer.tokenizer_type
    return host[TOKENIZERS].get(name, key="tokenizer.tokenizer_type").build.load()(config.tokenizer)


def build_datasets(config: Config, tokenizer: Tokenizer, split: Split, host: PluginHost) -> Mapping[str, Dataset]:
    """The data sets of a split by name: one named as the split, or several named validation sets."""
    samples = samples_wanted(config, split)
    if samples == 0:
        return {}
    spec = host[DATASETS].get(config.data.dataset_type, key="data.dataset_type")
    # `mt data` reads the sections of data and tokenizer alone.
    media = config.model.media_token_ids if hasattr(config, "model") else frozenset[int]()
    request = SplitRequest(split, samples, config.data.seq_length, config.train.seed, media)
    built = spec.build.load()(config.data, tokenizer, request)
    if built is None:
        return {}
    return by_name(built, split)


def by_name(data: Mapping[str, Dataset] | Dataset, split: Split) -> Mapping[str, Dataset]:
    """Data sets by name; a single one stands under the name of its split."""
    return data if isinstance(data, Mapping) else {split: data}


def build_train_data(config: Config, tokenizer: Tokenizer, host: PluginHost) -> Dataset:
    """The samples of all of training. Raises DataError when there are none."""
    datasets = build_datasets(config, tokenizer, "train", host)
    if not datasets:
        raise DataError(f"data.dataset_type={config.data.dataset_type} has no training samples")
    return in_epochs(datasets["train"], config)


def in_epochs(epoch: Dataset, config: Config) -> Dataset:
    """With train.train_epochs: so many of a data set that is one epoch; else the data set itself."""
    epochs = config.train.train_epochs
    if epochs is None:
        return epoch
    samples = iterations_of_epoch(len(epoch), config) * global_batch_size(config)  # whole steps only
    kind = EpochsOfBlend if hasattr(epoch, "counts") else EpochDataset
    return kind(epoch, epochs, samples, config.train.seed)


def with_resolved_epochs(config: Config, tokenizer: Tokenizer, host: PluginHost) -> Config:
    """train.train_iters filled in from train.train_epochs, if given, by building the training set."""
    if config.train.train_epochs is None:
        return config
    datasets = build_datasets(config, tokenizer, "train", host)
    return with_train_iters(config, len(datasets["train"]) if datasets else 0)


def samples_wanted(config: Config, split: Split) -> int | None:
    """Number of samples that training, or one evaluation, consumes; None: all of the data set, once."""
    train = config.train
    if split == "train":
        return total_train_samples(config) if train.train_epochs is None else None
    return None if train.full_validation else train.eval_iters * global_batch_size(config)


def require_samples(dataset: Dataset, needed: int) -> None:
    """Raise DataError when a training set has fewer samples than training consumes."""
    if len(dataset) < needed:
        raise DataError(
            f"training takes {needed} samples, the data set has {len(dataset)}; "
            f"lower train.train_iters or train.train_samples, or give more data"
        )


def unsuitable_data(inputs: Iterable[str], config: Config, host: PluginHost) -> str | None:
    """Says which of a model's inputs some data sets give and the configured one does not; None: it gives them all."""
    # Fields by the declared schema: no data set is opened to find out.
    names_of = {spec.name: {entry.name for entry in spec.sample} for spec in host[DATASETS]}
    chosen = names_of[host[DATASETS].get(config.data.dataset_type, key="data.dataset_type").name]
    missing = [name for name in inputs if name not in chosen and any(name in names for names in names_of.values())]
    if not missing:
        return None
    able = sorted(name for name, names in names_of.items() if names.issuperset(missing))
    others = f"; {', '.join(able)} do" if able else ""
    return (
        f"data.dataset_type={config.data.dataset_type} gives no {' and '.join(missing)}, which "
        f"model.family={config.model.family} takes{others}"
    )


def counts_tokens(config: Config, host: PluginHost) -> bool:
    """Whether the losses of a sample are those of its tokens: of a pair or a text to classify there is one."""
    sample = host[DATASETS].get(config.data.dataset_type, key="data.dataset_type").sample
    # A loss_mask without a dimension is one number for the whole sample.
    return all(field.shape != "[]" for field in sample if field.name == "loss_mask")
