"""Launches, and moved and saved bytes, of layers on the meta device, whoever wrote them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias", "device"}
NO_KERNEL |= {"_unsafe_view", "_reshape_alias", "lift_fresh"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "scaled_mm"}


class Launches(TorchDispatchMode):
    """Operators that a GPU runs as at least one kernel, by name. While `fused` is set, operators count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.moved = 0
        self.fused = 0

    def move(self, tensors: Iterable[Any]) -> None:
        """A launch reads or writes these, each once."""
        # Meta tensors have no data pointer: the storage's identity takes its place. A tensor that is given twice is
        # read once.
        memory = {(x.untyped_storage()._cdata, x.storage_offset(), x.shape): x.nbytes for x in flat(tensors)}
        self.moved += sum(memory.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # Views and allocations launch nothing.
        if not (func.is_view or name in NO_KERNEL or self.fused):
            self.names[name] += 1
            result = func(*args, **(kwargs or {}))
            if name not in PRODUCTS:
                self.move([args, result])
            return result
        return func(*args, **(kwargs or {}))

    def as_one(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, counted as one launch."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.names[name] += not self.fused
            self.fused += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.fused -= 1

        return counted


def flat(values: Any) -> list[Tensor]:
    """The tensors in nested lists."""
    if isinstance(values, Tensor):
        return [values]
    return [x for value in values for x in flat(value)] if isinstance(values, list | tuple) else []


class FlashAttention(torch.autograd.Function):
    """What every fused attention saves: its inputs, its output, and one number a row. One launch each way."""

    @staticmethod
    def forward(ctx: Any, launches: Launches, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, N, S, D], k and v [B, G, S, D] -> [B, S, N, D] in memory, seen as [B, N, S, D]"""
        launches.names["flash_attention"] += 1
        rows, heads, length, width = q.shape
        out = q.new_empty((rows, length, heads, width)).transpose(1, 2)
        ctx.launches = launches
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.launches.names["flash_attention_backward"] += 1
        return None, *(torch.empty_like(saved) for saved in ctx.saved_tensors[:3])


class FusedRMSNorm(torch.autograd.Function):
    """What torch's kernel for GPUs saves; on the meta device its RMSNorm is taken apart. One launch each way."""

    @staticmethod
    def forward(ctx: Any, launches: Launches, x: Tensor, weight: Tensor) -> Tensor:
        launches.names["fused_rms_norm"] += 1
        ctx.launches = launches
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.launches.names["fused_rms_norm_backward"] += 1
        return None, *(torch.empty_like(saved) for saved in ctx.saved_tensors[:2])


def use_fused_norms(launches: Launches) -> None:
    def rms_norm(x: Tensor, shape: object, weight: Tensor, eps: float | None = None) -> Tensor:
        return FusedRMSNorm.apply(launches, x, weight)

    F.rms_norm = rms_norm  # type: ignore[assignment]


def count(launches: Launches, model: nn.Module, run: Callable[[Tensor], Tensor], hidden: Tensor) -> dict[str, Any]:
    """Of run(hidden) and its backward pass. Storages that autograd saves are counted once, without parameters."""
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Autograd saves parameters by reference: they cost no memory beside the model.
        if storage._cdata not in known:
            saved[storage._cdata] = storage
        return tensor.detach()

    with launches:
        launches.names.clear()
        launches.moved = 0
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            out = run(hidden)
        forward = dict(launches.names)
        launches.names.clear()
        out.backward(torch.empty_like(out))
        backward = dict(launches.names)
    kept = sum(storage.nbytes() for storage in saved.values())
    return {"forward": forward, "backward": backward, "bytes": kept, "moved": launches.moved}
