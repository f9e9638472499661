"""Forward and backward passes over the micro-batches of a step, without pipeline parallelism.

`ForwardBackward` is the interface; `mt_core.train.pipelining` has the pipelined implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from mt_core.nn.batch_invariance import batch_invariant
from mt_core.nn.loss import Loss
from mt_core.nn.model import contract, model_options
from mt_core.optim.master_weights import MasterWeights, UnshardedWeights
from mt_core.train.time_parts import TimeParts

Batch = Mapping[str, Tensor]
ForwardStep = Callable[[nn.Module, Batch], Tensor]
"""(model, micro-batch) -> losses [batch, sequence], before masking"""
LossShare = Callable[[Tensor, Batch], Tensor]
"""(losses [batch, sequence], micro-batch) -> this micro-batch's contribution to the loss of the step, a scalar"""


def default_forward_step(loss: Loss) -> ForwardStep:
    """model(inputs of the batch), then the loss. `mt_core.nn.model.Model` declares the inputs and further arguments."""
    options = model_options(loss)

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        names = contract(model).inputs
        # A field that the batch does not have keeps the default of the model's forward.
        return loss(model(**{name: batch[name] for name in names if name in batch}, **options), batch)

    return forward


def invariant_step(step: ForwardStep, active: bool) -> ForwardStep:
    """The step, batch invariant if it is active (numerics.batch_invariant): as generation computes it."""

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        with batch_invariant(active):
            return step(model, batch)

    return forward


class ForwardBackward(Protocol):
    """Runs micro-batches through the model, forward and backward."""

    def forward_backward(self, batches: Sequence[Batch], share: LossShare) -> Tensor:
        """[] sum of the micro-batches' contributions to the loss; accumulates gradients. 0 without the output layer."""
        ...

    def forward(self, batches: Sequence[Batch], share: LossShare) -> Tensor:
        """Loss of `forward_backward`, without gradients."""
        ...


class NoPipelining:
    """The whole model on this rank: each micro-batch runs forward and backward before the next one.

    begin: called with each micro-batch before its forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_step: ForwardStep,
        weights: MasterWeights | None = None,
        begin: Callable[[Batch], object] = lambda batch: None,
        time: TimeParts | None = None,
    ) -> None:
        self.model, self.forward_step, self.begin = model, forward_step, begin
        self.time = time or TimeParts()
        self.weights = weights or UnshardedWeights(model)

    def forward_backward(self, batches: Sequence[Batch], share: LossShare) -> Tensor:
        # On the CPU: adding a tensor of the device to this scalar gives one of the device.
        total = torch.zeros(())
        for number, batch in enumerate(batches):
            self.weights.begin_pass(number)
            self.begin(batch)
            with self.time("forward"):
                part = share(self.forward_step(self.model, batch), batch)
            # Before the next forward pass: the activations of one micro-batch are alive at a time.
            with self.time("backward"):
                part.backward()
            total = total + part.detach()
        return total

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], share: LossShare) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            total = total + share(self.forward_step(self.model, batch), batch).double()
        return total
