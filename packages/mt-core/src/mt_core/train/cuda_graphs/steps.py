"""The gradients of a whole step as one CUDA graph: all forward and backward passes, the reduction and the norm.

The first steps with micro-batches of a form (their number, shapes and dtypes) run eagerly, on the capture stream. Then
the step is captured; from now on a step copies its micro-batches into static memory and launches one graph. The
optimizer's update is not captured: its learning rate changes, and the host passes it to a few kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mt_core.optim.master_weights import MasterWeights
from mt_core.train.cuda_graphs.capture import Form, Graph, Recorder, form_of, replaced, tensors_in
from mt_core.train.cuda_graphs.runs import MOST_FORMS, unchanged_buffers
from mt_core.train.step.forward_backward import Batch
from mt_core.train.step.optimizer_step import ComputeGradients


@dataclass(frozen=True)
class CapturedStep:
    """inputs: the static tensors of the micro-batches and the token count. gradients: the memory that a replay writes,
    of each parameter that has a gradient after the step."""

    graph: Graph
    inputs: Sequence[Tensor]
    outputs: tuple[Tensor, Tensor]
    gradients: Sequence[tuple[nn.Parameter, Tensor]]

    @torch.no_grad()
    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        for static, tensor in zip(self.inputs, inputs, strict=True):
            # On the same stream as the replay, which follows it.
            static.copy_(tensor, non_blocking=True)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            # No Python of the step has run: an eager step in between may have cleared or replaced the gradient.
            parameter.grad = gradient
        return self.outputs


class StepGraphs:
    """A graph for each form of the micro-batches, up to MOST_FORMS; steps of further forms run eagerly.

    Implements optimizer_step.CaptureGradients. Each form has memory of its own, for activations and gradients.
    """

    def __init__(self, model: nn.Module, weights: MasterWeights, recorder: Recorder, warmup_steps: int) -> None:
        self.model, self.weights, self.recorder, self.warmup_steps = model, weights, recorder, warmup_steps
        self.graphs: dict[Form, CapturedStep] = {}
        self._eager_steps: dict[Form, int] = {}
        self._memory = self._memory_of_weights()
        self._note: str | None = None

    def begin_step(self) -> str | None:
        """Call it before each step. Returns a message for the user if the step before was captured."""
        note, self._note = self._note, None
        return note

    def __call__(self, compute: ComputeGradients, batches: Sequence[Batch], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """compute(batches, tokens), by a graph where there is one. tokens: [] on the device."""
        self._forget_if_moved()
        arguments = list(batches), tokens
        form = form_of(arguments)
        if form not in self.graphs and self._captures(form):
            self.graphs[form] = self._capture(compute, *arguments)
            self._note = f"CUDA graph of the step captured, for {len(batches)} micro-batch{'es' * (len(batches) > 1)}"
        if form in self.graphs:
            return self.graphs[form].replay(tensors_in(arguments))
        # On the stream of the later capture, so that libraries have their workspaces there.
        with self.recorder.aside():
            return compute(batches, tokens)

    def _captures(self, form: Form) -> bool:
        """Whether steps of this form have warmed up; counts this one if not."""
        steps = self._eager_steps.get(form, 0)
        if steps < self.warmup_steps:
            self._eager_steps[form] = steps + 1
            return False
        return len(self.graphs) < MOST_FORMS

    def _capture(self, compute: ComputeGradients, batches: Sequence[Batch], tokens: Tensor) -> CapturedStep:
        # Outside of the capture: the copies belong to the caller and not to the pool of the graph.
        static_batches, static_tokens = replaced((batches, tokens), torch.clone, {})
        # Gradients that autograd allocates have to be in the graph's pool, and not those of the step before.
        self.model.zero_grad(set_to_none=True)
        with unchanged_buffers([self.model]), self.recorder.capture(self.recorder.new_pool()) as graph:
            outputs = compute(static_batches, static_tokens)
        named = (*self.model.parameters(), *(parameter for _, parameter in self.weights.named_parameters()))
        gradients = [(parameter, parameter.grad) for parameter in named if parameter.grad is not None]
        return CapturedStep(graph, tensors_in((static_batches, static_tokens)), outputs, gradients)

    def _forget_if_moved(self) -> None:
        """Graphs hold the addresses of weights; which are trained is part of what was captured."""
        if self._memory != (now := self._memory_of_weights()):
            self._memory, self.graphs, self._eager_steps = now, {}, {}

    def _memory_of_weights(self) -> list[tuple[int, bool]]:
        return [(parameter.data_ptr(), parameter.requires_grad) for parameter in self.model.parameters()]
