"""Builds the components of a run from its configuration; each is looked up by name in the plugin host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mt_core._torch_compat import symmetric_memory_objection
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.checks import check_warmup, global_batch_size, world_size
from mt_core.config.loading import LoadedConfig
from mt_core.config.parallel import ParallelConfig
from mt_core.config.schema import Config
from mt_core.data import building
from mt_core.data.training_length import total_train_samples
from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_core.launch.environment import read_environment
from mt_core.launch.process_group import local_device
from mt_core.nn.auxiliary import RunsUncompiled
from mt_core.nn.batch_invariance import require_batch_invariance
from mt_core.nn.build_context import ModelBuildContext, active_transforms
from mt_core.nn.context_parallel.core import build_hierarchical_axes
from mt_core.nn.fp8.use import use_fp8
from mt_core.nn.kernels.choice import Kernels, use_kernels
from mt_core.nn.layout import initialize
from mt_core.nn.model import NumberedLayers
from mt_core.optim.base import Optimizer, OptimizerBuildContext
from mt_core.optim.finalize_grads import SHARDS, TiedWeights
from mt_core.optim.fully_sharded_weights import FullyShardedWeights, ShardOptions, ends_when_told
from mt_core.optim.master_weights import (
    Fp32RemainderWeights,
    MasterWeights,
    RemainderWeights,
    build_master_weights,
)
from mt_core.optim.param_and_grad_buffer import BufferOptions, ParamAndGradBuffer
from mt_core.optim.param_groups import GroupSchedules, matches, param_groups, weight_decay_schedule
from mt_core.optim.schedules import Horizon, LRSchedule
from mt_core.parallel.communicators import CommunicatorOptions, peer_access_objection
from mt_core.parallel.context import AxisSizes, ParallelContext, axis_members, build_parallel_context
from mt_core.parallel.pipeline.schedules import configured_schedule, splits_backward
from mt_core.parallel.pipeline.stage import Stage
from mt_core.plugins import PluginHost
from mt_core.specs import DATASETS, LR_SCHEDULES, MODELS, OPTIMIZERS, TOKENIZERS
from mt_core.train.auto_choices import REMAINDERS
from mt_core.train.checkpoint.state import merged_over_stages
from mt_core.train.memory import WithoutMemory, allocate_parameters, build_within_memory
from mt_core.train.pipelining import model_stages

ModelProvider = Callable[[Any, ModelBuildContext], nn.Module]
"""(section [model], environment) -> the model, or the stages of it that the environment names"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU of this rank if one is available, else the CPU. Raises ConfigError when there are too few."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch finds no CUDA device; use cpu or auto (mt doctor shows more)")
    return local_device(read_environment(), name) if name == "cuda" else torch.device(name)


def resolve_config(loaded: LoadedConfig, host: PluginHost) -> tuple[Config, Tokenizer, torch.device]:
    """The configuration with what the tokenizer and the data set determine. Sets the number of threads."""
    config = loaded.config
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    device = resolve_device(config.train.device)
    tokenizer = building.build_tokenizer(config, host)
    # The number of steps follows from the length of the data set, and the length of the warm-up is checked against it.
    config = building.with_resolved_epochs(with_vocab_size(config, tokenizer), tokenizer, host)
    if config.train.train_epochs is not None:
        check_warmup(config, loaded.origin)
    return config, tokenizer, device


def axis_sizes(config: Config) -> AxisSizes:
    parallel = config.parallel
    return AxisSizes(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
        replicate=parallel.num_distributed_optimizer_instances,
    )


def require_process_group() -> None:
    """Raises ConfigError for one of several processes of torchrun without a process group: each would train alone."""
    if "RANK" in os.environ and world_size() > 1 and not dist.is_initialized():
        raise ConfigError(
            f"this is one of {world_size()} processes (RANK and WORLD_SIZE are set) and has no process group, so that "
            'each would train a model of its own; put the script inside `with mt_core.launch.rank_session("cuda"):` '
            'or "cpu"'
        )


def build_context(config: Config, device: torch.device) -> ParallelContext:
    """The parallel context of this process. Collective over the world."""
    sizes, parallel = axis_sizes(config), config.parallel
    if parallel.nccl_ub and device.type != "cuda":
        raise ConfigError(
            f"parallel.nccl_ub=true: buffers are registered with NCCL, and gloo communicates on {device.type}; set "
            "it to false, or train.device=cuda"
        )
    # Before the groups are made, so that no rank waits for one that raises.
    if parallel.tp_comm_overlap:
        require_symmetric_memory(config, device)
    ctx = build_parallel_context(
        sizes,
        device=device,
        # FSDP2 shards the fp32 master weights and casts them to 16 bits when they are all-gathered.
        params_dtype=torch.float32 if parallel.use_torch_fsdp2 else DTYPES[config.precision.dtype],
        sequence_parallel=parallel.sequence_parallel,
        tp_comm_overlap=parallel.tp_comm_overlap,
        communicators={
            name: CommunicatorOptions(**options.model_dump()) for name, options in parallel.nccl_communicators.items()
        },
        pipeline_backward_communicator=has_backward_communicator(parallel, device),
    )
    # After the context, which determines the ranks of the axis.
    if parallel.tp_comm_overlap:
        require_peer_access(ctx.tp.ranks)
    if parallel.hierarchical_context_parallel_sizes is None or ctx.cp.size == 1:
        return ctx
    members = axis_members(ctx.world.size, sizes)["cp"]
    inner, outer = build_hierarchical_axes(members, parallel.hierarchical_context_parallel_sizes)
    return replace(ctx, axes={**ctx.axes, "cp_inner": inner, "cp_outer": outer})


def require_symmetric_memory(config: Config, device: torch.device) -> None:
    """Raises ConfigError where parallel.tp_comm_overlap cannot be."""
    objection = None
    if device.type != "cuda":
        objection = f"symmetric memory is that of GPUs, and this run is on {device.type}"
    elif config.precision.fp8_format != "none":
        objection = f"products in FP8 (precision.fp8_format={config.precision.fp8_format}) are not overlapped"
    else:
        objection = symmetric_memory_objection()
    if objection is not None:
        raise ConfigError(f"parallel.tp_comm_overlap=true cannot be: {objection}; set it to false")


def require_peer_access(ranks: Sequence[int]) -> None:
    """Raises ConfigError where parallel.tp_comm_overlap cannot be over these ranks."""
    objection = peer_access_objection(ranks, read_environment().local_world_size)
    if objection is not None:
        raise ConfigError(
            f"parallel.tp_comm_overlap=true cannot be over tensor-parallel ranks: {objection}; set it to false"
        )


def has_backward_communicator(parallel: ParallelConfig, device: torch.device) -> bool:
    """Whether pipeline stages send gradients through other communicators than activations."""
    wanted = parallel.pipeline_backward_communicator
    return parallel.pipeline_model_parallel_size > 1 and (device.type == "cuda" if wanted is None else wanted)


def restore_tokenizer(config: Config, files: Mapping[str, bytes], host: PluginHost) -> Tokenizer:
    """The tokenizer of a checkpoint, from the tokenizer files stored in it."""
    spec = host[TOKENIZERS].get(config.tokenizer.tokenizer_type, key="tokenizer.tokenizer_type")
    if spec.materialize is None or not files:
        return spec.build.load()(config.tokenizer)
    # The folder is removed on return: a tokenizer reads its files when it is built.
    with TemporaryDirectory(prefix="mt-tokenizer-") as folder:
        return spec.build.load()(spec.materialize.load()(config.tokenizer, files, Path(folder)))


def with_vocab_size(config: Config, tokenizer: Tokenizer) -> Config:
    """model.vocab_size filled in from the tokenizer, or checked against it."""
    vocab_size = config.model.vocab_size
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}; "
            f"leave it unset or use at least {tokenizer.vocab_size}"
        )
    model = config.model.model_copy(update={"vocab_size": vocab_size or tokenizer.vocab_size})
    return config.model_copy(update={"model": model})


def build_model(
    config: Config,
    ctx: ParallelContext,
    host: PluginHost,
    stages: tuple[Stage, ...] | None = None,
    kernels: Kernels | None = None,
    provider: ModelProvider | None = None,
) -> nn.Module:
    """The model, or some stages of it, with uninitialized weights. kernels: those of the run, if already chosen.
    provider: builds the model in place of its family."""
    require_batch_invariance(config, ctx.device)
    provider = provider or host[MODELS].get(config.model.family, key="model.family").build.load()
    every = None if stages is None else tuple(model_stages(config, host))
    environment = ModelBuildContext(config, ctx, host, stages, kernels, every)
    replaced = replaces_parameters(config, host)
    with WithoutMemory() if replaced else nullcontext():
        model = provider(config.model, environment)
    model = transform_model(model, environment)
    if replaced:  # else a model that is too large has parameters without memory, until it is refused
        allocate_parameters(model, ctx.device)
    use_kernels(model.modules(), environment.kernels)
    use_fp8(model, config, ctx, environment.kernels)
    return model


def transform_model(model: nn.Module, context: ModelBuildContext) -> nn.Module:
    """The model after the registered transforms that its configuration turns on."""
    for spec in active_transforms(context.config, context.host):
        model = spec.transform.load()(model, context.config, context)
    return model


def replaces_parameters(config: Config, host: PluginHost) -> bool:
    """Whether a transform replaces parameters that the family declares, which are not allocated then."""
    return any(spec.replaces_parameters for spec in active_transforms(config, host))


def count_flops(config: Config, host: PluginHost) -> float | None:
    """Floating-point operations of training on a sample; None for a family that does not count them."""
    count = host[MODELS].get(config.model.family, key="model.family").training_flops
    return count.load()(config) if count is not None else None


def compile_blocks(model: nn.Module, config: Config) -> None:
    """Compile each layer with torch.compile, as train.compile requests, except modules that run uncompiled. Layers of
    the same kind share compiled code.

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
    for module in model.modules():
        if isinstance(module, RunsUncompiled):
            module.forward = torch.compiler.disable(module.forward)
    for layer in (layer for stack in stacks for layer in stack):
        # Compile forward and not __call__: hooks then run outside the compiled region, and a CUDA graph can wrap it.
        layer.forward = torch.compile(layer.forward)


def build_initialized_model(
    config: Config,
    ctx: ParallelContext,
    host: PluginHost,
    stages: tuple[Stage, ...] | None = None,
    kernels: Kernels | None = None,
    provider: ModelProvider | None = None,
) -> nn.Module:
    """`build_model` with weights drawn from `train.seed`: the same canonical tensors under every layout."""
    # Memory is allocated but not written; initialize() writes every parameter.
    model = build_within_memory(lambda: build_model(config, ctx, host, stages, kernels, provider), config, ctx, host)
    initialize(model, config.train.seed, ctx)
    return model


def shards_over_instances(config: Config) -> bool:
    """Whether the instances that replicate weights have parts of the optimizer's state."""
    return config.parallel.use_torch_fsdp2 and config.parallel.outer_dp_sharding_strategy == "optim"


def shards_state(config: Config) -> bool:
    """Whether gradients and optimizer state are sharded over the ranks that hold the same weights."""
    return config.parallel.use_distributed_optimizer or config.parallel.use_torch_fsdp2


def keeps_remainders(config: Config) -> bool:
    """Whether the optimizer keeps the low 16 bits of each fp32 weight beside the bf16 weight, instead of a copy."""
    return getattr(config.optimizer, "main_weights", None) == REMAINDERS


def _shares_weights(parallel: ParallelConfig, host: PluginHost) -> bool:
    return parallel.pipeline_model_parallel_size > 1 and configured_schedule(parallel, host).placement == "v"


def build_weights(
    config: Config, model: nn.Module, ctx: ParallelContext, copies: TiedWeights, host: PluginHost
) -> MasterWeights:
    """The master weights that the optimizer updates. Buckets are used only when there are ranks to reduce with."""
    parallel, precision = config.parallel, config.precision
    in_fp32 = precision.dtype == "fp32" or precision.accumulate_allreduce_grads_in_fp32
    if parallel.nccl_ub:
        require_registered_buffers(ctx)
    if parallel.use_torch_fsdp2:
        return FullyShardedWeights(model, ctx, _shard_options(config, host))
    # Experts may have replicas where the dense weights have none, and the reverse.
    in_buckets = max(ctx.dp_cp.size, ctx.axis("edp").size) > 1 or parallel.use_distributed_optimizer
    if keeps_remainders(config) and not in_buckets:
        return Fp32RemainderWeights(model) if in_fp32 else RemainderWeights(model)
    # Accumulation in 16 bits is implemented by the buffer only.
    if in_fp32 and not in_buckets:
        return build_master_weights(model)
    options = BufferOptions(
        sharded=parallel.use_distributed_optimizer,
        bucket_elements=parallel.ddp_bucket_size,
        # A weight shared by two stages of a rank gets two gradients per micro-batch.
        overlap_reduce=parallel.overlap_grad_reduce and not _shares_weights(parallel, host),
        overlap_gather=parallel.overlap_param_gather,
        accumulate_in_fp32=in_fp32,
        reduce_in_bf16=precision.grad_reduce_in_bf16,
        user_buffers=parallel.nccl_ub,
        keeps_remainders=keeps_remainders(config),
    )
    return ParamAndGradBuffer(model, ctx, options, copies.axes)


def require_registered_buffers(ctx: ParallelContext) -> None:
    """Raises ConfigError where parallel.nccl_ub would be ignored."""
    axes = [ctx.axis(shard) for shard, _ in SHARDS.values()]
    if max(axis.size for axis in axes) == 1:
        raise ConfigError(
            "parallel.nccl_ub=true registers buffers with the communicator of data-parallel ranks (the axes shard and "
            "expert_shard), and each of these has one rank; set it to false"
        )


def _shard_options(config: Config, host: PluginHost) -> ShardOptions:
    parallel, precision = config.parallel, config.precision
    if splits_backward(parallel, host) and not ends_when_told():
        raise ConfigError(
            f"parallel.pipeline_schedule={parallel.pipeline_schedule} with parallel.use_torch_fsdp2 needs torch 2.15, "
            f"and this is {torch.__version__}; use gpipe, 1f1b or interleaved_1f1b, or "
            "parallel.use_distributed_optimizer"
        )
    dtype = DTYPES[precision.dtype]
    return ShardOptions(
        dtype,
        parallel.fsdp_reshard_after_forward,
        precision.grad_reduce_in_bf16,
        splits_backward(parallel, host),
        parallel.nccl_ub,
        parallel.fsdp_reduce_each_micro_batch,
        shards_over_instances(config),
    )


def build_optimizer(config: Config, environment: OptimizerBuildContext, host: PluginHost) -> Optimizer:
    options = config.optimizer
    groups = param_groups(
        environment.weights.named_parameters(),
        options.weight_decay,
        environment.shapes,
        decoupled=options.decoupled_lr is not None,
        undecayed=options.no_weight_decay,
        rates={name: layout.lr_mult for name, layout in environment.layouts.items()},
        epsilons={name: layout.eps_mult for name, layout in environment.layouts.items()},
    )
    require_used_patterns("optimizer.no_weight_decay", options.no_weight_decay, environment.shapes, environment.ctx)
    spec = host[OPTIMIZERS].get(options.optimizer, key="optimizer.optimizer")
    return spec.build.load()(options, groups, environment)


def require_used_patterns(key: str, patterns: Sequence[str] | None, names: Iterable[str], ctx: ParallelContext) -> None:
    """Raises ConfigError for a pattern that no parameter has, on any pipeline stage. names: those of this rank's
    parameters. Collective."""
    if not patterns:
        return
    matching = dict.fromkeys(pattern for name in names for pattern in patterns if matches(name, [pattern]))
    used = merged_over_stages(matching, ctx)
    if unused := [pattern for pattern in patterns if pattern not in used]:
        raise ConfigError(
            f"{key}: no parameter has the name {', '.join(unused)}; the names are those of "
            "mt ckpt inspect, with * for any characters"
        )


def build_schedule(config: Config, host: PluginHost) -> LRSchedule:
    return _build_schedule(config, host, config.optimizer.lr, config.optimizer.min_lr)


def build_group_schedules(config: Config, host: PluginHost) -> GroupSchedules:
    """Schedules of single parameter groups: decoupled learning rate and weight decay."""
    options, decoupled = config.optimizer, None
    if options.decoupled_lr is not None:
        lowest = options.min_lr if options.decoupled_min_lr is None else options.decoupled_min_lr
        decoupled = _build_schedule(config, host, options.decoupled_lr, lowest)
    return GroupSchedules(decoupled, weight_decay_schedule(options, total_train_samples(config)))


def _build_schedule(config: Config, host: PluginHost, max_lr: float, min_lr: float) -> LRSchedule:
    return lr_schedule(config, host, Horizon(total_train_samples(config), global_batch_size(config), max_lr, min_lr))


def lr_schedule(config: Config, host: PluginHost, horizon: Horizon) -> LRSchedule:
    """The configured schedule over a training of any length."""
    spec = host[LR_SCHEDULES].get(config.lr_schedule.lr_decay_style, key="lr_schedule.lr_decay_style")
    return spec.build.load()(config.lr_schedule, horizon)


# -- files of checkpoints ----------------------------------------------------------------------------
#
# Those of the tokenizer, the ones beside them in the checkpoint that the run starts from (generation_config.json,
# preprocessor_config.json), and what the data set adds (a chat template).


def kept_files(
    config: Config, tokenizer: Tokenizer, source: CheckpointReader | None, host: PluginHost
) -> Mapping[str, bytes]:
    """By name. source: the checkpoint that the run starts from or resumes, or None."""
    beside = {} if source is None else files_beside_tokenizer(config, tokenizer, source, host)
    files = {**beside, **tokenizer.files()}
    spec = host[DATASETS].get(config.data.dataset_type, key="data.dataset_type")
    return files if spec.checkpoint_files is None else spec.checkpoint_files.load()(config.data, tokenizer, files)


def files_beside_tokenizer(
    config: Config, tokenizer: Tokenizer, source: CheckpointReader, host: PluginHost
) -> dict[str, bytes]:
    """The files of `source` that are not the tokenizer's; {} if the run has another tokenizer than `source`, since
    their token ids would be another vocabulary's."""
    files, stored = tokenizer.files(), source.files()
    section = source.metadata.get("config", {}).get("tokenizer") or {}
    same_type = section.get("tokenizer_type") == config.tokenizer.tokenizer_type
    if any(stored.get(name) != data for name, data in files.items()) or not (files or same_type):
        return {}
    beside = {name: data for name, data in stored.items() if name not in files}
    # A tokenizer that is built from a folder reads some files only if they are there: those change what it is.
    if beside and restore_tokenizer(config, {**beside, **files}, host).fingerprint() != tokenizer.fingerprint():
        return {}
    return beside
