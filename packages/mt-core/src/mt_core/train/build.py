"""Makes the parts of a run from its configuration, asking the plugin host for each by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from mt_core.config.checks import global_batch_size
from mt_core.config.schema import Config
from mt_core.data.batch_size import total_train_samples
from mt_core.errors import ConfigError
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.layout import initialize
from mt_core.optim.main_weights import MainWeights
from mt_core.optim.optimizers import Optimizer, param_groups
from mt_core.optim.schedules import Horizon, Schedule
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.plugins import PluginHost
from mt_core.specs import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch finds no CUDA device; use cpu or auto (mt doctor tells more)")
    # Each rank of a machine has a GPU of its own.
    return torch.device(name, int(os.environ.get("LOCAL_RANK", "0"))) if name == "cuda" else torch.device(name)


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


def build_optimizer(config: Config, weights: MainWeights, host: PluginHost) -> Optimizer:
    groups = param_groups(weights.named_parameters(), config.optimizer.weight_decay)
    spec = host.optimizers.get(config.optimizer.optimizer, key="optimizer.optimizer")
    return spec.build.load()(config.optimizer, groups)


def build_schedule(config: Config, host: PluginHost) -> Schedule:
    horizon = Horizon(
        total_train_samples(config), global_batch_size(config), config.optimizer.lr, config.optimizer.min_lr
    )
    spec = host.lr_schedules.get(config.lr_schedule.lr_decay_style, key="lr_schedule.lr_decay_style")
    return spec.build.load()(config.lr_schedule, horizon)
