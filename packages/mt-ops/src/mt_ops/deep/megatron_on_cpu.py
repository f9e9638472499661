"""Lets Megatron-Core compute on a CPU: `before_import` first, then megatron is imported, then `after_import`.

Whatever asks for CUDA gets the CPU; streams, events and synchronization do nothing. Names of this process change, and
no file. Needs torch alone: the environment has no mt.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "randperm"),
    *("linspace", "eye", "tril_indices", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like"),
)
WITHOUT_EFFECT = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_init")
BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def before_import() -> None:
    _replace_devices()
    _replace_streams()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda module, *args, **kwargs: module  # type: ignore[method-assign]


def after_import() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return function(*(CPU if _is_cuda(value) else value for value in args), **kwargs)

    return call


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class _Nothing:
    """A stream or an event."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None: ...


def _replace_devices() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *args: (9, 0)
    about = SimpleNamespace(major=9, minor=0, multi_processor_count=1, total_memory=1 << 34, name="cpu")
    cuda.get_device_properties = lambda *args: about
    cuda.get_device_name = lambda *args: "cpu"
    cuda.device = lambda *args: contextlib.nullcontext()
    cuda.mem_get_info = lambda *args: (1 << 34, 1 << 34)
    for name in WITHOUT_EFFECT:
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in BYTES:
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.manual_seed = cuda.manual_seed_all = lambda *args: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _replace_streams() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Nothing
    cuda.stream = lambda *args: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *args: _Nothing()
    cuda.is_current_stream_capturing = lambda: False
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda *args: None
