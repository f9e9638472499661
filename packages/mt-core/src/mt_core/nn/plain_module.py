"""Modules of torch without declared parameters: each process holds the whole module, and processes see other samples.

Their parameters keep the names and the initial values that the module gives them. Data parallelism, the distributed
optimizer and FSDP2 need nothing more; layouts that cut a module need `LayoutModule.declare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.config.parallel import ParallelConfig
from mt_core.config.sections import nothing_selected
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import ParameterLayout, declared_layouts
from mt_core.parallel.context import ParallelContext

CUT_BY = {
    "tensor_model_parallel_size": "the split of each parameter (LayoutModule.declare)",
    "expert_model_parallel_size": "which parameters belong to experts (LayoutModule.declare)",
    "pipeline_model_parallel_size": "its stages (the methods of mt_core.parallel.pipeline.stage.Pipelined)",
    "context_parallel_size": "layers that attend over sequences cut into parts (mt_core.nn.attention)",
}
"""Key of [parallel] that cuts a module or its sequences -> what the module has to declare for it."""


def build_plain_module(config: Any, environment: ModelBuildContext) -> nn.Module:
    """Raises ConfigError: such a model is given by a program, and this is called where none is."""
    raise ConfigError(nothing_selected("model", "family", environment.host))


def is_plain(model: nn.Module) -> bool:
    """Whether no parameter of the module was made by `LayoutModule.declare`."""
    return not declared_layouts(model)


def adopt_plain_module(model: nn.Module, ctx: ParallelContext) -> None:
    """Move the module to this process' device and dtype, declare its parameters whole, and give every rank the values
    of the first one. Collective. The layout has passed `require_whole`."""
    model.to(device=ctx.device, dtype=ctx.params_dtype)
    declare_whole(model)
    broadcast_from_first(model, ctx)
    if ctx.dp.size > 1 and any(True for _ in persistent_buffers(model)):
        # Buffers that a forward pass updates, such as BatchNorm's statistics, differ between ranks: each pass in
        # training begins with those of the first, as with torch's DistributedDataParallel.
        model.register_forward_pre_hook(
            lambda module, args: _broadcast_buffers(module, ctx) if module.training else None
        )


def require_whole(model: nn.Module, parallel: ParallelConfig) -> None:
    """Raise ConfigError for a layout that cuts a module which does not declare how."""
    for key, declaration in CUT_BY.items():
        size = getattr(parallel, key)
        if size > 1:
            raise ConfigError(
                f"parallel.{key}={size}: {type(model).__name__} is a plain nn.Module; it has to declare {declaration}, "
                "or set the key to 1 (docs/guides/custom-loops.md)"
            )
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if parallel.use_torch_fsdp2 and scalars:
        raise ConfigError(
            f"parallel.use_torch_fsdp2=true shards the rows of parameters, and {', '.join(scalars)} has shape []; give "
            "it shape [1], or use parallel.use_distributed_optimizer=true"
        )


def declare_whole(model: nn.Module) -> None:
    """Declare every parameter as whole on each rank, under the name that it has."""
    for module in model.modules():
        parameters = module.named_parameters(recurse=False)
        layouts = {
            name: ParameterLayout(tuple(p.shape), keep, dtype=p.dtype, trained=p.requires_grad)
            for name, p in parameters
        }
        if layouts:
            module.layouts = layouts  # type: ignore[assignment]


def keep(tensor: Tensor, generator: torch.Generator) -> Any:
    """The initialization of a parameter that has its values already."""
    raise AssertionError("a plain module initializes itself")


def broadcast_from_first(model: nn.Module, ctx: ParallelContext) -> None:
    """The first rank's parameters and buffers on all data-parallel ranks, as modules draw from generators of their
    process."""
    if ctx.dp.size > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), ctx.dp.ranks[0], group=ctx.dp.group)
        _broadcast_buffers(model, ctx)


def _broadcast_buffers(model: nn.Module, ctx: ParallelContext) -> None:
    for _, buffer in persistent_buffers(model):
        dist.broadcast(buffer, ctx.dp.ranks[0], group=ctx.dp.group)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to the module's state_dict, by name."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer
