"""What CUDA graphs of decode steps do not support, by configuration key."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from mt_core.config.schema import InferenceConfig
from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import SynchronizesHost
from mt_core.nn.cache import MemoryState, PositionState
from mt_core.nn.model import as_generator
from mt_core.parallel.context import ParallelContext

KEY = "inference.cuda_graphs"


def uses_graphs(model: nn.Module, options: InferenceConfig, ctx: ParallelContext) -> bool:
    """Whether decode steps are captured. Raises ConfigError where that is requested and cannot be."""
    if options.cuda_graphs == "none":
        return False
    reason = next(graph_objections(model, options, ctx), None)
    if reason is not None and options.cuda_graphs == "decode":
        raise ConfigError(f"{KEY}=decode cannot be: {reason}; or {KEY}=auto, which does without graphs")
    return reason is None


def graph_objections(model: nn.Module, options: InferenceConfig, ctx: ParallelContext) -> Iterator[str]:
    """Why decode steps cannot be captured, and what to set instead."""
    if ctx.device.type != "cuda":
        yield f"graphs are CUDA's, and this engine is on {ctx.device.type}; use a GPU"
    yield from layer_objections(model, options, ctx)


def layer_objections(model: nn.Module, options: InferenceConfig, ctx: ParallelContext) -> Iterator[str]:
    """As graph_objections, on any device."""
    # The asserts of decoding.batch rely on these.
    for axis, key in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        if (size := ctx.axis(axis).size) > 1:  # type: ignore[arg-type]
            yield f"parallel.{key}_model_parallel_size={size} communicates in each step; set it to 1"
    if options.batch_invariant:
        yield "inference.batch_invariant=true computes sequences one by one; set it to false"
    if options.cache_dtype != "auto":
        yield f"inference.cache_dtype={options.cache_dtype} is dequantized sequence by sequence; set it to auto"
    if options.speculative_method is not None:
        yield f"inference.speculative_method={options.speculative_method} computes several positions; leave it out"
    inputs = as_generator(model).conditioned_by
    if inputs:
        yield f"{type(model).__name__} takes {' and '.join(inputs)} beside tokens; use a model of text alone"
    for layer in as_generator(model).cached_layers():
        state = layer.cached_state()
        if isinstance(state, MemoryState) or (isinstance(state, PositionState) and not state.is_paged):
            yield f"{type(layer).__name__} has no attention over a paged cache; use another family"
    for module in model.modules():
        reason = module.host_wait() if isinstance(module, SynchronizesHost) else None
        if reason is not None:
            yield reason
