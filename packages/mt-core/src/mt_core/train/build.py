"""Makes the parts of a run from its configuration, asking the plugin host for each by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from mt_core.config.checks import global_batch_size
from mt_core.config.schema import Config
from mt_core.errors import ConfigError, DataError
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.layout import initialize
from mt_core.optim.main_weights import MainWeights
from mt_core.optim.optimizers import param_groups
from mt_core.optim.schedules import Horizon, Schedule
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.plugins import PluginHost
from mt_core.specs import Dataset, Split, SplitRequest, Tokenizer
from mt_core.train.batch_size import total_train_samples

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch finds no CUDA device; use cpu or auto (mt doctor tells more)")
    return torch.device(name)


def axis_sizes(config: Config) -> AxisSizes:
    parallel = config.parallel
    return AxisSizes(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
    )


def build_context(config: Config, device: torch.device) -> ParallelContext:
    return build_parallel_context(axis_sizes(config), device=device, params_dtype=DTYPES[config.precision.dtype])


def build_tokenizer(config: Config, host: PluginHost) -> Tokenizer:
    name = config.tokenizer.tokenizer_type
    return host.tokenizers.get(name, key="tokenizer.tokenizer_type").build.load()(config.tokenizer)


def restore_tokenizer(config: Config, files: Mapping[str, bytes], host: PluginHost) -> Tokenizer:
    """The tokenizer of a checkpoint, from the files that travelled with it."""
    spec = host.tokenizers.get(config.tokenizer.tokenizer_type, key="tokenizer.tokenizer_type")
    if spec.materialize is None or not files:
        return spec.build.load()(config.tokenizer)
    with TemporaryDirectory(prefix="mt-tokenizer-") as folder:
        return spec.build.load()(spec.materialize.load()(config.tokenizer, files, Path(folder)))


def with_vocab_size(config: Config, tokenizer: Tokenizer) -> Config:
    """model.vocab_size filled in from the tokenizer, or checked against it."""
    given = config.model.vocab_size
    if given is not None and given < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size={given} is smaller than the tokenizer's {tokenizer.vocab_size}; "
            f"leave it unset or use at least {tokenizer.vocab_size}"
        )
    model = config.model.model_copy(update={"vocab_size": given or tokenizer.vocab_size})
    return config.model_copy(update={"model": model})


def build_model(config: Config, ctx: ParallelContext, host: PluginHost) -> nn.Module:
    """The model with uninitialized weights."""
    spec = host.models.get(config.model.family, key="model.family")
    return spec.build.load()(config.model, ModelEnvironment(config, ctx, host))


def build_initialized_model(config: Config, ctx: ParallelContext, host: PluginHost) -> nn.Module:
    model = build_model(config, ctx, host)
    initialize(model, config.train.seed, ctx)
    return model


def build_optimizer(config: Config, weights: MainWeights, host: PluginHost) -> torch.optim.Optimizer:
    groups = param_groups(weights.named_parameters(), config.optimizer.weight_decay)
    spec = host.optimizers.get(config.optimizer.optimizer, key="optimizer.optimizer")
    return spec.build.load()(config.optimizer, groups)


def build_schedule(config: Config, host: PluginHost) -> Schedule:
    horizon = Horizon(
        total_train_samples(config), global_batch_size(config), config.optimizer.lr, config.optimizer.min_lr
    )
    spec = host.lr_schedules.get(config.lr_schedule.lr_decay_style, key="lr_schedule.lr_decay_style")
    return spec.build.load()(config.lr_schedule, horizon)


def build_datasets(config: Config, tokenizer: Tokenizer, split: Split, host: PluginHost) -> Mapping[str, Dataset]:
    """The data sets of a split by name: one named as the split, or several named validation sets."""
    samples = {
        "train": total_train_samples(config),
        "valid": config.train.eval_iters * global_batch_size(config),
        "test": config.train.eval_iters * global_batch_size(config),
    }[split]
    if not samples:
        return {}
    spec = host.datasets.get(config.data.dataset_type, key="data.dataset_type")
    request = SplitRequest(split, samples, config.data.seq_length, config.train.seed)
    built = spec.build.load()(config.data, tokenizer, request)
    if built is None:
        return {}
    return built if isinstance(built, Mapping) else {split: built}


def require_samples(dataset: Dataset, needed: int) -> None:
    """Raise DataError when a training set is shorter than training."""
    if len(dataset) < needed:
        raise DataError(
            f"training takes {needed} samples, the data set has {len(dataset)}; "
            f"lower train.train_iters or train.train_samples, or give more data"
        )
