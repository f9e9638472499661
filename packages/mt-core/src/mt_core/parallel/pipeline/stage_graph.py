"""The autograd graph of one micro-batch in one stage, from its input to its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mt_core.parallel.pipeline.activations import Activations, form_of, tensors_of
from mt_core.parallel.pipeline.split_backward import backward_of_inputs


class StageGraph:
    """Keeps the graph but not the output tensor, whose memory is freed once it is sent.

    inputs: the activations that the stage received, as autograd leaves; None for the first stage. output: its
    activations, or the loss.
    """

    def __init__(self, inputs: Activations | None, output: Activations) -> None:
        self.output_form = form_of(output)
        self._leaves = [] if inputs is None else [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
        # A gradient edge keeps the node and not the tensor. The send holds the values until they are sent.
        self._edges = [get_gradient_edge(tensor) for tensor in tensors_of(output) if tensor.requires_grad]
        self._weights: Callable[[], None] | None = None

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Accumulate the weights' gradients; return those of the leaves. gradients: of the outputs that have one."""
        # Accumulates into .grad of the leaves as well, which belong to this micro-batch alone.
        self._backward_of_all(gradients)
        found = [_or_zeros(leaf.grad, leaf) for leaf in self._leaves]
        self._free()
        return found

    def backward_input(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the leaves only; `backward_weight` has to follow."""
        if not self._leaves:  # the first stage: no input gradient, so the whole backward pass runs in backward_weight
            # Such schedules place BACKWARD_WEIGHT after every BACKWARD_INPUT, also in the first stage.
            self._weights = partial(self._backward_of_all, gradients)
            return []
        found, self._weights = backward_of_inputs(self._edges, gradients, self._leaves)
        return [_or_zeros(gradient, leaf) for gradient, leaf in zip(found, self._leaves, strict=True)]

    def backward_weight(self) -> None:
        assert self._weights is not None
        self._weights()
        self._weights = None
        self._free()

    def _backward_of_all(self, gradients: Sequence[Tensor]) -> None:
        # A stage may consist of frozen weights, or have no layers.
        if self._edges:
            torch.autograd.backward(self._edges, list(gradients))

    def _free(self) -> None:
        self._leaves, self._edges = [], []


def as_leaves(hidden: Activations) -> Activations:
    """Detached tensors with the same values and the same requires_grad."""
    # detach() shares the memory: no copy is made between stages of one rank.
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors_of(hidden)]
    return form_of(hidden).pack(leaves)


def _or_zeros(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    # The other side has posted a receive for each tensor that requires a gradient, so something has to be sent.
    return torch.zeros_like(leaf) if gradient is None else gradient
