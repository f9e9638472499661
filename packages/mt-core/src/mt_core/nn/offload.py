"""Activations of single modules in host memory, as Megatron-Core's fine-grained activation offloading.

What a named module keeps for its backward pass is copied to host memory in its forward pass, and back when its backward
pass reads it. Weights stay where they are. On a GPU the copies are pinned, and those to the host run beside the
computation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from mt_core.config.schema import RecomputeConfig
from mt_core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
CORE = "core_attn"
NORMS: Mapping[str, tuple[str, ...]] = {"attn_norm": ("input_layernorm",), "mlp_norm": ("pre_mlp_layernorm",)}
LINEARS: Mapping[str, tuple[str, ...]] = {
    "qkv_linear": (
        *("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
        *("linear_kv_down_proj", "linear_kv_up_proj"),
    ),
    "attn_proj": ("linear_proj",),
}
"""Name in recompute.offload_modules -> names of modules of a layer, or of its attention."""


@runtime_checkable
class OffloadsParts(Protocol):
    """A module with parts that are no modules."""

    def offload_parts(self, names: Collection[str], offload: Callable[[F], F]) -> Collection[str]:
        """Replace what the names stand for by `offload` of it. Returns the names that the module has."""
        ...


@dataclass(frozen=True)
class HostCopy:
    """A saved tensor in host memory. copied: what follows the copy on its stream; None on a CPU."""

    values: Tensor
    device: torch.device
    copied: Any

    def load(self) -> Tensor:
        if self.copied is None:
            return self.values.to(self.device)
        torch.cuda.current_stream(self.device).wait_event(self.copied)
        # The pinned memory is kept until the copy is done: its allocator records the stream.
        return self.values.to(self.device, non_blocking=True)


@dataclass
class Offload:
    """Copies to host memory of tensors with at least `min_size` elements."""

    min_size: int
    _streams: dict[torch.device, Any] = field(default_factory=dict)

    def __call__(self, function: F, weights: Callable[[], Iterator[Tensor]] = lambda: iter(())) -> F:
        """The function, whose saved tensors wait in host memory. weights: tensors that stay, read at each call."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            stay = {weight.untyped_storage().data_ptr() for weight in weights()}

            def pack(tensor: Tensor) -> Tensor | HostCopy:
                small = tensor.numel() < self.min_size
                # A view of a weight, such as its transpose, has its memory.
                return tensor if small or tensor.untyped_storage().data_ptr() in stay else self._copy(tensor)

            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    def module(self, module: nn.Module) -> None:
        """Replace the forward of a module, and of a norm the sum with a branch before it."""
        for name in ("forward", "add"):
            if hasattr(module, name):
                setattr(module, name, self(getattr(module, name), module.parameters))

    def _copy(self, tensor: Tensor) -> HostCopy:
        if tensor.device.type != "cuda":
            return HostCopy(tensor.detach().clone(), tensor.device, None)
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream = self._streams.setdefault(tensor.device, None) or torch.cuda.Stream(tensor.device)
        self._streams[tensor.device] = stream
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            copy.copy_(tensor.detach(), non_blocking=True)
        # Its memory is used again only when the copy has been made.
        tensor.record_stream(stream)
        return HostCopy(copy, tensor.device, stream.record_event())


def _unpack(kept: Tensor | HostCopy) -> Tensor:
    return kept.load() if isinstance(kept, HostCopy) else kept


def offloaded_core(core: F, config: RecomputeConfig) -> F:
    """The attention core, whose activations wait in host memory."""
    return Offload(config.min_offloaded_tensor_size)(core)


def offload_modules(model: nn.Module, config: RecomputeConfig) -> set[str]:
    """Replace the forwards of the modules that recompute.offload_modules names, once kernels are chosen. Returns the
    names that this model has."""
    names, seen = set(config.offload_modules), set[str]()
    if not names:
        return seen
    offload = Offload(config.min_offloaded_tensor_size)
    for path, module in list(model.named_modules()):
        parent, _, leaf = path.rpartition(".")
        attention = parent.endswith("self_attention")
        if CORE in names and hasattr(module, "core"):
            seen.add(CORE)
        for name, leaves in {**NORMS, **LINEARS}.items():
            if name in names and leaf in leaves and (name in NORMS or attention):
                offload.module(module)
                seen.add(name)
        if isinstance(module, OffloadsParts):
            seen |= set(module.offload_parts(names, offload))
    return seen


def require_offloaded(config: RecomputeConfig, seen: Collection[str]) -> None:
    """Raises ConfigError for modules that no stage of the model has."""
    if missing := [name for name in config.offload_modules if name not in seen]:
        raise ConfigError(
            f"recompute.offload_modules has {', '.join(missing)}, which this model has not; remove "
            f"{'it' if len(missing) == 1 else 'them'}"
        )
