"""Makes the parts of a run from its configuration, asking the plugin host for each by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from mt_core.config.checks import global_batch_size
from mt_core.config.schema import Config, ParallelConfig
from mt_core.data.batch_size import total_train_samples
from mt_core.errors import ConfigError
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.layout import ParameterLayout, initialize
from mt_core.nn.stage import Stage
from mt_core.optim.buffered_weights import BufferedWeights, BufferOptions
from mt_core.optim.fully_sharded_weights import FullyShardedWeights, ShardOptions
from mt_core.optim.main_weights import MainWeights, build_main_weights
from mt_core.optim.optimizers import Optimizer, param_groups
from mt_core.optim.schedules import Horizon, Schedule
from mt_core.parallel.context import AxisSizes, ParallelContext, axis_members, build_parallel_context
from mt_core.parallel.context_parallel import build_hierarchical_axes
from mt_core.parallel.pipeline.schedules import get_schedule
from mt_core.parallel.stage_copies import StageCopies
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
        etp=parallel.expert_tensor_parallel_size,
        instances=parallel.num_distributed_optimizer_instances,
    )


def build_context(config: Config, device: torch.device) -> ParallelContext:
    """This process's place in the layout. Collective over the world."""
    sizes, parallel = axis_sizes(config), config.parallel
    ctx = build_parallel_context(
        sizes,
        device=device,
        # FSDP2 divides fp32 weights, and makes 16-bit ones of them as they are used.
        params_dtype=torch.float32 if parallel.use_torch_fsdp2 else DTYPES[config.precision.dtype],
        sequence_parallel=parallel.sequence_parallel,
    )
    if parallel.cp_comm_type != "a2a+p2p" or ctx.cp.size == 1:
        return ctx
    assert parallel.hierarchical_context_parallel_sizes is not None  # checked with the configuration
    members = axis_members(ctx.world.size, sizes)["cp"]
    inner, outer = build_hierarchical_axes(members, parallel.hierarchical_context_parallel_sizes)
    return replace(ctx, axes={**ctx.axes, "cp_inner": inner, "cp_outer": outer})


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


def build_model(
    config: Config, ctx: ParallelContext, host: PluginHost, stages: tuple[Stage, ...] | None = None
) -> nn.Module:
    """The model, or some stages of it, with uninitialized weights."""
    spec = host.models.get(config.model.family, key="model.family")
    return spec.build.load()(config.model, ModelEnvironment(config, ctx, host, stages))


def build_initialized_model(
    config: Config, ctx: ParallelContext, host: PluginHost, stages: tuple[Stage, ...] | None = None
) -> nn.Module:
    model = build_model(config, ctx, host, stages)
    initialize(model, config.train.seed, ctx)
    return model


def divides_state(config: Config) -> bool:
    """Whether ranks with the same weights hold different parts of gradients and optimizer state."""
    return config.parallel.use_distributed_optimizer or config.parallel.use_torch_fsdp2


def _shares_weights(parallel: ParallelConfig) -> bool:
    return parallel.pipeline_model_parallel_size > 1 and get_schedule(parallel.pipeline_schedule).placement == "v"


def build_weights(config: Config, model: nn.Module, ctx: ParallelContext, copies: StageCopies) -> MainWeights:
    """What the optimizer works on. Without other ranks to share the work with, no buckets are needed."""
    parallel, precision = config.parallel, config.precision
    in_fp32 = precision.dtype == "fp32" or precision.accumulate_allreduce_grads_in_fp32
    if parallel.use_torch_fsdp2:
        shards = ShardOptions(
            DTYPES[precision.dtype], parallel.fsdp_reshard_after_forward, precision.grad_reduce_in_bf16
        )
        return FullyShardedWeights(model, ctx, shards)
    alone = max(ctx.dp_cp.size, ctx.axis("edp").size) == 1
    if alone and in_fp32 and not parallel.use_distributed_optimizer:
        return build_main_weights(model)
    options = BufferOptions(
        divided=parallel.use_distributed_optimizer,
        bucket_elements=parallel.ddp_bucket_size,
        # A weight that two stages of a rank share gets two gradients a pass.
        overlap_reduce=parallel.overlap_grad_reduce and not _shares_weights(parallel),
        overlap_gather=parallel.overlap_param_gather,
        accumulate_in_fp32=in_fp32,
        reduce_in_bf16=precision.grad_reduce_in_bf16,
    )
    return BufferedWeights(model, ctx, options, copies.axes)


def build_optimizer(
    config: Config, weights: MainWeights, layouts: Mapping[str, ParameterLayout], host: PluginHost
) -> Optimizer:
    shapes = {name: layout.shape for name, layout in layouts.items()}
    groups = param_groups(weights.named_parameters(), config.optimizer.weight_decay, shapes)
    spec = host.optimizers.get(config.optimizer.optimizer, key="optimizer.optimizer")
    return spec.build.load()(config.optimizer, groups)


def build_schedule(config: Config, host: PluginHost) -> Schedule:
    horizon = Horizon(
        total_train_samples(config), global_batch_size(config), config.optimizer.lr, config.optimizer.min_lr
    )
    spec = host.lr_schedules.get(config.lr_schedule.lr_decay_style, key="lr_schedule.lr_decay_style")
    return spec.build.load()(config.lr_schedule, horizon)
