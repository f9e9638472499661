"""Layout rules that depend on the registered pipeline schedule or context-parallel method."""

from __future__ import annotations

import math
from importlib.util import find_spec

from mt_core.config.checks import divisors
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_core.specs import CONTEXT_PARALLEL_METHODS, PIPELINE_SCHEDULES


def check_pipeline_schedule(config: Config, host: PluginHost) -> None:
    """Raises ConfigError when layers, stages and schedule do not fit. Skipped where torch is not installed."""
    parallel = config.parallel
    spec = host[PIPELINE_SCHEDULES].get(parallel.pipeline_schedule, key="parallel.pipeline_schedule")
    if parallel.pipeline_model_parallel_size == 1 or find_spec("torch") is None:
        return
    # Imports torch.
    from mt_core.train.pipelining import model_stages

    model_stages(config, host)
    if not spec.schedule.load().splits_backward:
        return
    if parallel.use_torch_fsdp2 and parallel.fsdp_reshard_after_forward:
        raise ConfigError(
            f"parallel.pipeline_schedule={spec.name} does a backward pass in two halves, between which weights stay "
            "whole; set parallel.fsdp_reshard_after_forward=false, or use gpipe, 1f1b or interleaved_1f1b"
        )
    if config.train.cuda_graphs != "none":
        raise ConfigError(
            f"train.cuda_graphs={config.train.cuda_graphs} cannot be: parallel.pipeline_schedule={spec.name} does a "
            "backward pass in two halves, which a graph does at once; use gpipe, 1f1b or interleaved_1f1b, or "
            "train.cuda_graphs=none"
        )
    if config.train.loss == "linear_cross_entropy_sum":
        raise ConfigError(
            f"parallel.pipeline_schedule={spec.name} runs the backward pass of inputs apart from that of weights, and "
            f"train.loss={config.train.loss} has its gradients for one pass; use train.loss=linear_cross_entropy, or "
            "parallel.pipeline_schedule=1f1b"
        )


def check_context_parallel_method(config: Config, host: PluginHost) -> None:
    parallel = config.parallel
    spec = host[CONTEXT_PARALLEL_METHODS].get(parallel.cp_comm_type, key="parallel.cp_comm_type")
    sizes, size = parallel.hierarchical_context_parallel_sizes, parallel.context_parallel_size
    legal = ", ".join(f"[{inner}, {size // inner}]" for inner in divisors(size))
    if spec.hierarchical and sizes is None:
        raise ConfigError(
            f"parallel.cp_comm_type={spec.name} needs parallel.hierarchical_context_parallel_sizes; it can be {legal}"
        )
    if sizes is not None and not spec.hierarchical:
        able = [method.name for method in host[CONTEXT_PARALLEL_METHODS] if method.hierarchical]
        raise ConfigError(
            f"parallel.hierarchical_context_parallel_sizes={list(sizes)} is used with parallel.cp_comm_type="
            f"{' or '.join(able)} only, and it is {spec.name}; remove the sizes or set that"
        )
    if sizes is not None and math.prod(sizes) != size:
        raise ConfigError(
            f"parallel.hierarchical_context_parallel_sizes={list(sizes)} do not multiply to "
            f"parallel.context_parallel_size={size}; it can be {legal}"
        )
