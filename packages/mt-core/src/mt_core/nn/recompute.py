"""Activation recomputation (Chen et al., 2016; Korthikanti et al., 2022) and offloading of activations to host memory.

Random state is restored for the second computation, so dropout drops the same elements. Collectives inside run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mt_core.config.schema import RecomputeConfig
from mt_core.nn.dropout import SAMPLE, AtSample
from mt_core.parallel.collectives import gather_copies, split_to
from mt_core.parallel.context import ParallelContext

HIDDEN_DIM = 2
"""Dimension of activations [B, S, H] that saved inputs are sharded along."""
Layers = Sequence[tuple[int, nn.Module]]
Call = Callable[[int, nn.Module, Tensor], Tensor]
"""(number, layer, [B, S, H]) -> [B, S, H]"""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Recompute:
    """Runs a stack of layers as [recompute] says."""

    config: RecomputeConfig
    ctx: ParallelContext

    def run(self, layers: Layers, x: Tensor, call: Call) -> Tensor:
        """x through the layers of a stage, each by `call`."""
        if not torch.is_grad_enabled():
            return _through(layers, x, call)
        for place, group in enumerate(self._groups(layers)):
            x = self.group(place, group, x, call)
        return x

    def group(self, place: int, layers: Layers, x: Tensor, call: Call) -> Tensor:
        """x through layers that keep one input together, or all they need. place: of the group in its stage."""
        with self._offloading(place):
            return self._keep_input_only(layers, x, call) if self._recomputes(place) else _through(layers, x, call)

    def module(self, name: str, module: nn.Module) -> nn.Module:
        """The module, whose forward is recomputed when recompute_modules names it."""
        if self.selects(name):
            module.forward = recomputed(module.forward)
        return module

    def selects(self, name: str) -> bool:
        return self.config.recompute_granularity == "selective" and name in self.config.recompute_modules

    def _groups(self, layers: Layers) -> list[Layers]:
        """Layers that keep one input together."""
        config = self.config
        if config.recompute_granularity != "full" or config.recompute_method == "block":
            return [[layer] for layer in layers]
        # Megatron's method uniform: one saved input for every recompute_num_layers layers. block: the first
        # recompute_num_layers layers of a stage one by one, the others keep everything.
        size = config.recompute_num_layers or 1
        return [layers[start : start + size] for start in range(0, len(layers), size)]

    def _recomputes(self, place: int) -> bool:
        config = self.config
        if config.recompute_granularity != "full":
            return False
        return config.recompute_method == "uniform" or place < (config.recompute_num_layers or place + 1)

    def _keep_input_only(self, group: Layers, x: Tensor, call: Call) -> Tensor:
        if not self.config.distribute_saved_activations or self.ctx.tp.size == 1:
            return recomputed(_through)(group, x, call)
        # The input is replicated over tp: each rank saves a shard of it, and backward all-gathers.
        part = split_to(x, HIDDEN_DIM, self.ctx.tp)  # [B, S, H / tp]
        return recomputed(lambda kept: _through(group, gather_copies(kept, HIDDEN_DIM, self.ctx.tp), call))(part)

    def _offloading(self, place: int) -> AbstractContextManager[object]:
        if place >= self.config.cpu_offloading_num_layers:
            return nullcontext()
        # Pinned memory, as copies from and to pageable memory make the host wait.
        return torch.autograd.graph.save_on_cpu(pin_memory=self.ctx.device.type == "cuda")


def remade(make: Callable[[], tuple[Tensor, ...]], use: Callable[..., Tensor]) -> Tensor:
    """use(*make()), where what `use` keeps of make's results for its backward pass is made again there.

    `recomputed` around `make` alone would free nothing: its results are kept by what uses them.
    """
    if not torch.is_grad_enabled():
        return use(*make())
    # Latent attention: make = queries, keys and values from their latents, use = the attention core, which keeps them.
    results = make()
    discarded = _Discarded(make, results)
    # Around `use` alone: what `make` saves for its own backward pass stays.
    with torch.autograd.graph.saved_tensors_hooks(discarded.pack, discarded.unpack):
        return use(*results)


@dataclass(frozen=True)
class _Place:
    """A view of one of make's results."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Discarded:
    """Keeps places in place of tensors, and makes the tensors again when the first is requested."""

    def __init__(self, make: Callable[[], tuple[Tensor, ...]], results: Sequence[Tensor]) -> None:
        self._make, self._contexts = make, _contexts()[1]
        # By storage: `use` may save views of the results, such as transposes.
        self._numbers = {tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(results)}
        self._again: tuple[Tensor, ...] | None = None
        self._packed = self._unpacked = 0

    def pack(self, tensor: Tensor) -> Tensor | _Place:
        number = self._numbers.get(tensor.untyped_storage().data_ptr())
        if number is None:  # not of make: kept as it is
            return tensor
        self._packed += 1
        return _Place(number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: Tensor | _Place) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self._again is None:
            # Values alone: the graph of make was recorded by the first call.
            with torch.no_grad(), self._contexts:
                self._again = self._make()
        whole = self._again[kept.number]
        self._unpacked += 1
        # All were taken out once: free them. A second pass (a split backward) makes them again.
        if self._unpacked % self._packed == 0:
            self._again = None
        return whole.as_strided(kept.size, kept.stride, kept.offset)


def recomputed(function: F) -> F:
    """The function with activation recomputation: it saves its arguments instead of intermediate tensors."""

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        # Not reentrant: arguments without gradients, and backward passes for some inputs, work.
        return checkpoint(function, *args, use_reentrant=False, context_fn=_contexts)

    return run  # type: ignore[return-value]


def _contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """For the first computation and for the second, which may come when another micro-batch is at hand."""
    # SAMPLE is read when the layer runs first. In the backward pass of a pipeline schedule it is that of another
    # micro-batch.
    return nullcontext(), AtSample(SAMPLE.get())


def _through(layers: Layers, x: Tensor, call: Call) -> Tensor:
    for number, layer in layers:
        x = call(number, layer, x)
    return x
