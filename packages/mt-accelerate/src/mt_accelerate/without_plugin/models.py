"""A program's module on all ranks: DistributedDataParallel, in the precision of the program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mt_accelerate.handlers import AutocastKwargs, DDPCommunicationHookType, DistributedDataParallelKwargs
from mt_accelerate.operations import convert_to_fp32

FORWARD = "_mt_accelerate_forward"
"""Attribute with the program's own forward, while the precision is another."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str, options: AutocastKwargs) -> AbstractContextManager[Any]:
    """Products in the 16-bit precision; nothing with precision="no"."""
    dtype, enabled = DTYPES.get(precision, torch.bfloat16), precision in DTYPES and options.enabled
    return torch.autocast(device.type, dtype, enabled, cache_enabled=options.cache_enabled)


def prepare(
    model: nn.Module,
    device: torch.device,
    precision: str,
    cast: AutocastKwargs,
    options: DistributedDataParallelKwargs,
    *,
    place: bool,
    evaluation: bool,
) -> nn.Module:
    """The module on its device. Collective: with several ranks it has the first rank's weights, and gradients are
    means over ranks. evaluation: no gradients are exchanged."""
    if place:
        model.to(device)
    if precision in DTYPES and not hasattr(model, FORWARD):
        setattr(model, FORWARD, model.forward)
        model.forward = _in_precision(model.forward, lambda: autocast(device, precision, cast))
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if not dist.is_initialized() or evaluation or not trained or isinstance(model, DistributedDataParallel):
        return model
    arguments = {name: value for name, value in options.to_kwargs().items() if not name.startswith("comm_")}
    ids = [device.index] if device.type == "cuda" else None
    replicated = DistributedDataParallel(model, device_ids=ids, **arguments)
    _register_hook(replicated, options)
    return replicated


def _register_hook(model: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    """What sends the gradients in place of an all-reduce, where options name it."""
    hooks: dict[str, Callable[..., Any]] = {
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
        DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
        DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[str, Callable[..., Any]] = {
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
    }
    # Without a hook a wrapper has nothing to wrap, as in Accelerate.
    if (hook := hooks.get(options.comm_hook)) is None:
        return
    wrap = wrappers.get(options.comm_wrapper)
    state = powerSGD_hook.PowerSGDState(None, **options.comm_state_option) if "power" in options.comm_hook else None
    model.register_comm_hook(state, hook if wrap is None else wrap(hook))


def _in_precision(forward: Callable[..., Any], cast: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*inputs: Any, **options: Any) -> Any:
        with cast():
            outputs = forward(*inputs, **options)
        # Losses outside of the module are computed in 32 bits.
        return convert_to_fp32(outputs)

    return wrapper


def unwrap(model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_compiled: bool = False) -> nn.Module:
    """The program's own module."""
    while isinstance(model, DistributedDataParallel | nn.DataParallel):
        model = model.module
    if not keep_compiled and hasattr(model, "_orig_mod"):
        model = cast(nn.Module, model._orig_mod)
    if not keep_fp32_wrapper and hasattr(model, FORWARD):
        model.forward = getattr(model, FORWARD)
        delattr(model, FORWARD)
    return model
