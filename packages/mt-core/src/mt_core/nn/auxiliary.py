"""What layers contribute to training beside their output: auxiliary losses, post-step hooks, metrics, fault reports.

The trainer finds these by walking the modules of the model; a layer needs no way to reach the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class _Attach(torch.autograd.Function):
    """Identity on x; backward adds the value of `loss` to `total` and gives it the gradient `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: Tensor, total: Tensor) -> Tensor:
        ctx.factor, ctx.total, ctx.loss = factor, total, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # In backward: it runs once for each micro-batch, while a recomputed forward pass runs twice.
        ctx.total += ctx.loss.float()
        return grads[0], ctx.factor.to(ctx.loss.dtype), None, None


class AuxiliaryLoss(nn.Module):
    """A loss that a layer adds: the model's loss becomes loss + mean over micro-batches of this one.

    `x = self.balance(x, loss)` passes x [any shape] on unchanged and ties the scalar `loss` to it: x's backward
    pass is the loss's. `loss` has its coefficient in it, and is the same number on every rank that shares the
    micro-batch; each of them gets the gradient of its own part. The mean over the micro-batches of a step and over
    data-parallel ranks is reported as `name`. A value counts when its backward pass runs: once, also where the
    forward pass is recomputed. Both numbers that outlive a pass are on the device and keep their addresses, so that
    layers with losses can be captured in CUDA graphs.
    """

    _factor: Tensor | None
    _total: Tensor | None

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._scale = 1.0
        self.register_buffer("_factor", None, persistent=False)
        self.register_buffer("_total", None, persistent=False)

    @property
    def scale(self) -> float:
        """What the trainer multiplies the gradient by: loss scale / micro-batches of the step over all ranks."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = value
        if self._factor is not None:
            self._factor.fill_(value)

    def forward(self, x: Tensor, loss: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return x
        # Made at the first use, when the device is known; later filled in place, as captured graphs read these
        # addresses.
        if self._factor is None or self._total is None:
            self._factor = torch.full((), self._scale, dtype=torch.float64, device=loss.device)
            self._total = torch.zeros((), dtype=torch.float32, device=loss.device)
        return _Attach.apply(x, loss, self._factor, self._total)

    def take(self) -> float:
        """Sum over the micro-batches since the last call."""
        total = self.take_on_device()
        return 0.0 if total is None else float(total)

    def take_on_device(self) -> Tensor | None:
        """Same as `take`, [] fp32 on the device, without synchronization. None before the first micro-batch."""
        if self._total is None:
            return None
        total = self._total.clone()  # then cleared in place
        self._total.zero_()
        return total


@runtime_checkable
class PostStepHook(Protocol):
    """A module with state of a step (counts, a balancing bias), changed at its end on all ranks together.

    Also at the end of a step whose update is skipped: it counts nothing of the step before, and on a GPU the host does
    not read whether it was.
    """

    def after_step(self) -> None: ...


@runtime_checkable
class ReportsGraphObjection(Protocol):
    """A module that reports whether its passes can be captured in CUDA graphs, with those of the modules in it."""

    def graph_objection(self) -> str | None:
        """Why they cannot be, by configuration key, and what to set instead; None if they can."""
        ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """A module with metrics to log beside the loss. The same names on every rank that holds the module."""

    def metrics(self) -> Mapping[str, float]: ...


@runtime_checkable
class ReportsNonFinite(Protocol):
    """A module that sets a flag on its device when its values are not finite, without synchronization. The flag is
    read after a step has failed."""

    def fault(self) -> str | None:
        """ "the logits of decoder.layers.3.mlp.router", if these were not finite in this run."""
        ...


@runtime_checkable
class SynchronizesHost(Protocol):
    """A module whose forward pass may wait for the device, so that no CUDA graph can be captured of it."""

    def host_wait(self) -> str | None:
        """What is waited for and which key to change; None: nothing is."""
        ...


class RunsUncompiled:
    """A mixin of modules whose forward pass torch.compile leaves as it is: it consists of kernels that the compiler
    cannot join with others, and breaks off at their launches."""


def auxiliary_losses(model: nn.Module) -> Iterator[AuxiliaryLoss]:
    return (module for module in model.modules() if isinstance(module, AuxiliaryLoss))
