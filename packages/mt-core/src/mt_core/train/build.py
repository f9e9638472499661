"""Makes the parts of a run from its configuration, asking the plugin host for each by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from mt_core.config.checks import global_batch_size
from mt_core.config.schema import Config, ParallelConfig
from mt_core.data.batch_size import total_train_samples
from mt_core.errors import ConfigError
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.fp8.use import use_fp8
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.use import use_kernels
from mt_core.nn.layout import initialize
from mt_core.nn.stage import NumberedLayers, Stage
from mt_core.optim.buffered_weights import BufferedWeights, BufferOptions
from mt_core.optim.environment import OptimizerEnvironment
from mt_core.optim.fully_sharded_weights import FullyShardedWeights, ShardOptions, ends_when_told
from mt_core.optim.group_schedules import GroupSchedules, weight_decay_schedule
from mt_core.optim.main_weights import MainWeights, SplitWeights, build_main_weights
from mt_core.optim.optimizers import Optimizer
from mt_core.optim.param_groups import param_groups
from mt_core.optim.schedules import Horizon, Schedule
from mt_core.parallel.context import AxisSizes, ParallelContext, axis_members, build_parallel_context
from mt_core.parallel.context_parallel import build_hierarchical_axes
from mt_core.parallel.pipeline.schedules import get_schedule, splits_backward
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
    config: Config,
    ctx: ParallelContext,
    host: PluginHost,
    stages: tuple[Stage, ...] | None = None,
    kernels: Kernels | None = None,
) -> nn.Module:
    """The model, or some stages of it, with uninitialized weights. kernels: those of the run, if it has some."""
    spec = host.models.get(config.model.family, key="model.family")
    environment = ModelEnvironment(config, ctx, host, stages, kernels)
    model = spec.build.load()(config.model, environment)
    use_kernels(model.modules(), environment.kernels)
    use_fp8(model, config, ctx)
    return model


def compile_blocks(model: nn.Module, config: Config) -> None:
    """Let torch.compile make one graph of each layer, as train.compile asks. Layers of one kind share what is compiled.

    Raises ConfigError for a model without a stack of layers.
    """
    if config.train.compile == "none":
        return
    stacks = [module for module in model.modules() if isinstance(module, NumberedLayers)]
    if not stacks:
        raise ConfigError(
            f"train.compile={config.train.compile} compiles the layers of a stack, and model.family="
            f"{config.model.family} has none; set train.compile=none"
        )
    for layer in (layer for stack in stacks for layer in stack):
        # Not the whole call: hooks stay outside, and so can a CUDA graph be around it.
        layer.forward = torch.compile(layer.forward)


def build_initialized_model(
    config: Config,
    ctx: ParallelContext,
    host: PluginHost,
    stages: tuple[Stage, ...] | None = None,
    kernels: Kernels | None = None,
) -> nn.Module:
    model = build_model(config, ctx, host, stages, kernels)
    initialize(model, config.train.seed, ctx)
    return model


def require_options(model: nn.Module, loss: object, config: Config) -> None:
    """Raises ConfigError when a loss wants of a model what its forward does not offer."""
    options = getattr(loss, "model_options", {})
    missing = [name for name in options if name not in signature(model.forward).parameters]
    refuse = getattr(model, "needs_logits", None)
    if missing or (options and refuse):
        reason = refuse or f"its forward takes no {' or '.join(missing)}"
        raise ConfigError(
            f"train.loss={config.train.loss} takes hidden states, which model.family={config.model.family} does not "
            f"hand over: {reason}; use train.loss=cross_entropy"
        )


def divides_state(config: Config) -> bool:
    """Whether ranks with the same weights hold different parts of gradients and optimizer state."""
    return config.parallel.use_distributed_optimizer or config.parallel.use_torch_fsdp2


def keeps_remainders(config: Config) -> bool:
    """Whether the optimizer completes bf16 weights by the 16 bits that they leave out."""
    return getattr(config.optimizer, "main_weights", "copies") == "remainders"


def _shares_weights(parallel: ParallelConfig) -> bool:
    return parallel.pipeline_model_parallel_size > 1 and get_schedule(parallel.pipeline_schedule).placement == "v"


def build_weights(config: Config, model: nn.Module, ctx: ParallelContext, copies: StageCopies) -> MainWeights:
    """What the optimizer works on. Without other ranks to share the work with, no buckets are needed."""
    parallel, precision = config.parallel, config.precision
    in_fp32 = precision.dtype == "fp32" or precision.accumulate_allreduce_grads_in_fp32
    if parallel.use_torch_fsdp2:
        return FullyShardedWeights(model, ctx, _shard_options(config))
    alone = max(ctx.dp_cp.size, ctx.axis("edp").size) == 1
    if keeps_remainders(config):
        return SplitWeights(model)
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


def _shard_options(config: Config) -> ShardOptions:
    parallel, precision = config.parallel, config.precision
    if splits_backward(parallel) and not ends_when_told():
        raise ConfigError(
            f"parallel.pipeline_schedule={parallel.pipeline_schedule} with parallel.use_torch_fsdp2 needs torch 2.15, "
            f"and this is {torch.__version__}; use gpipe, 1f1b or interleaved_1f1b, or "
            "parallel.use_distributed_optimizer"
        )
    dtype = DTYPES[precision.dtype]
    return ShardOptions(
        dtype, parallel.fsdp_reshard_after_forward, precision.grad_reduce_in_bf16, splits_backward(parallel)
    )


def build_optimizer(config: Config, environment: OptimizerEnvironment, host: PluginHost) -> Optimizer:
    options = config.optimizer
    groups = param_groups(
        environment.weights.named_parameters(),
        options.weight_decay,
        environment.shapes,
        decoupled=options.decoupled_lr is not None,
    )
    spec = host.optimizers.get(options.optimizer, key="optimizer.optimizer")
    build = spec.build.load()
    return build(options, groups, environment) if spec.takes_environment else build(options, groups)


def build_schedule(config: Config, host: PluginHost) -> Schedule:
    return _build_schedule(config, host, config.optimizer.lr, config.optimizer.min_lr)


def build_group_schedules(config: Config, host: PluginHost) -> GroupSchedules:
    """What some groups of parameters have of their own beside the schedule of the run."""
    options, decoupled = config.optimizer, None
    if options.decoupled_lr is not None:
        lowest = options.min_lr if options.decoupled_min_lr is None else options.decoupled_min_lr
        decoupled = _build_schedule(config, host, options.decoupled_lr, lowest)
    return GroupSchedules(decoupled, weight_decay_schedule(options, total_train_samples(config)))


def _build_schedule(config: Config, host: PluginHost, max_lr: float, min_lr: float) -> Schedule:
    horizon = Horizon(total_train_samples(config), global_batch_size(config), max_lr, min_lr)
    spec = host.lr_schedules.get(config.lr_schedule.lr_decay_style, key="lr_schedule.lr_decay_style")
    return spec.build.load()(config.lr_schedule, horizon)
