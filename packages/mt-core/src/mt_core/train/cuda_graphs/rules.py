"""What CUDA graphs do not support, by configuration key, and what is captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import PostStepHook, ReportsGraphObjection
from mt_core.nn.dropout import Dropout
from mt_core.nn.model import NumberedLayers
from mt_core.optim.base import Optimizer
from mt_core.optim.master_weights import MasterWeights
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_core.train.cuda_graphs.capture import CudaRecorder
from mt_core.train.cuda_graphs.runs import BlockGraphs, LayerRun
from mt_core.train.cuda_graphs.steps import StepGraphs
from mt_core.train.step.optimizer_step import needs_numbers_at_once


def build_graphs(
    model: nn.Module,
    weights: MasterWeights,
    optimizer: Optimizer,
    config: Config,
    ctx: ParallelContext,
    stages: Sequence[Stage] | None,
) -> BlockGraphs | StepGraphs | None:
    """Graphs of the model's layers or of whole steps, as train.cuda_graphs requests. stages: the pipeline stages of
    this process.

    Raises ConfigError for what cannot be captured.
    """
    scope, steps = config.train.cuda_graphs, config.train.cuda_graph_warmup_steps
    if scope == "none":
        return None
    reason = reason_against(model, config, ctx) or (reason_against_step(config, optimizer) if scope == "step" else None)
    if reason is not None:
        raise ConfigError(f"train.cuda_graphs={scope} cannot be: {reason}; or train.cuda_graphs=none")
    recorder = CudaRecorder(torch.cuda.current_stream(ctx.device))  # that of `use_capture_stream`
    if scope == "step":
        return StepGraphs(model, weights, recorder, steps)
    return BlockGraphs([LayerRun(layers, recorder, steps) for layers in rows_of_layers(model, stages)])


def reason_against(model: nn.Module, config: Config, ctx: ParallelContext) -> str | None:
    """The first setting or layer that graphs do not support, and what to set instead; None if there is no such."""
    return next(iter(_reasons(model, config, ctx)), None)


def reason_against_step(config: Config, optimizer: Optimizer) -> str | None:
    """Reason against graphs of whole steps where graphs of layers are supported; None if there is no reason."""
    parallel = config.parallel
    if (size := parallel.pipeline_model_parallel_size) > 1:
        return (
            f"parallel.pipeline_model_parallel_size={size}: the host decides between stages what is sent and received "
            "next; set it to 1, or train.cuda_graphs=blocks"
        )
    if parallel.overlap_param_gather:
        return (
            "parallel.overlap_param_gather=true waits within a step for what was launched before it; set it to false, "
            "or train.cuda_graphs=blocks"
        )
    if config.train.deferred_metrics == "never":
        return "train.deferred_metrics=never reads the norm before the update; set it to auto"
    return needs_numbers_at_once(config, optimizer)


def _reasons(model: nn.Module, config: Config, ctx: ParallelContext) -> Iterator[str]:
    if ctx.device.type != "cuda":
        yield f"graphs are CUDA's, and this run is on {ctx.device.type}; set train.device=cuda"
    yield from _reasons_in_settings(config)
    yield from _reasons_in_layers(model, config)


def _reasons_in_settings(config: Config) -> Iterator[str]:
    parallel, recompute = config.parallel, config.recompute
    if config.data.reset_attention_mask:
        yield (
            "data.reset_attention_mask=true packs documents, whose number differs from batch to batch; set it to false"
        )
    if recompute.recompute_granularity != "none":
        yield (
            f"recompute.recompute_granularity={recompute.recompute_granularity} runs forward passes again with random "
            "state that the host keeps; set it to none"
        )
    if recompute.cpu_offloading_num_layers:
        yield (
            f"recompute.cpu_offloading_num_layers={recompute.cpu_offloading_num_layers} moves what the backward pass "
            "keeps, and a graph keeps it in one place; set it to 0"
        )
    if recompute.offload_modules:
        yield (
            f"recompute.offload_modules={recompute.offload_modules} moves what the backward pass keeps, and a graph "
            "keeps it in one place; set it to []"
        )
    if parallel.use_torch_fsdp2:
        yield (
            "parallel.use_torch_fsdp2=true collects weights in memory that changes; use "
            "parallel.use_distributed_optimizer"
        )
    if config.precision.fp8_format != "none" and config.precision.fp8_implementation == "te":
        yield (
            "precision.fp8_implementation=te keeps scales on the host from call to call; use torch, or "
            "precision.fp8_format=none"
        )
    if config.precision.fp8_recipe == "nvfp4" and config.precision.fp4_stochastic_rounding:
        yield (
            "precision.fp4_stochastic_rounding=true draws by the sample at hand, which a graph would repeat; set it to "
            "false"
        )


def _reasons_in_layers(model: nn.Module, config: Config) -> Iterator[str]:
    stacks = outermost_stacks(model)
    if not stacks:
        yield f"it captures the layers of a stack, and model.family={config.model.family} has none; use another family"
    if len(stacks) > 1 and config.parallel.pipeline_model_parallel_size > 1:
        yield (
            f"model.family={config.model.family} has {len(stacks)} stacks of layers, which pipeline stages cut in ways "
            "that graphs do not follow; set parallel.pipeline_model_parallel_size=1"
        )
    inside = [module for stack in stacks for module in stack.modules()]
    answering = [module for module in inside if isinstance(module, ReportsGraphObjection)]
    yield from (objection for module in answering if (objection := module.graph_objection()) is not None)
    # A module that reports its own objections answers for all modules inside it.
    answered = {id(part) for module in answering for part in module.modules()}
    if any(isinstance(module, PostStepHook) and id(module) not in answered for module in inside):
        yield f"layers of model.family={config.model.family} update themselves through the host; use another family"
    for key in ("hidden_dropout", "attention_dropout"):
        if getattr(config.model, key, 0.0) > 0.0:
            yield (
                f"model.{key}={getattr(config.model, key)} is seeded by the host at each place and micro-batch, and a "
                "graph would drop the same elements each time; set it to 0"
            )
    for name, module in model.named_modules():
        if isinstance(module, Dropout) and module.rate > 0.0:
            yield f"{name} drops elements with a seed of the host (rate {module.rate}); set that rate to 0"


def rows_of_layers(model: nn.Module, stages: Sequence[Stage] | None) -> list[list[nn.Module]]:
    """Sequences of layers that run one after another: whole stacks, or the part of one in a pipeline stage."""
    stacks = outermost_stacks(model)
    if stages is None:
        return [list(stack) for stack in stacks]
    rows = ([stack[number] for number in stage.layers] for stack in stacks for stage in stages)
    return [row for row in rows if row]


def outermost_stacks(model: nn.Module) -> list[NumberedLayers]:
    """The stacks that are not nested in the layers of another stack."""
    stacks = [module for module in model.modules() if isinstance(module, NumberedLayers)]
    inner = {id(module) for stack in stacks for layer in stack for module in layer.modules()}
    return [stack for stack in stacks if id(stack) not in inner and len(stack)]
