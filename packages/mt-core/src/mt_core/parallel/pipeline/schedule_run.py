"""One execution of a pipeline schedule: the actions of this rank on the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mt_core.parallel.pipeline.p2p_communicator import Incoming, P2PCommunicator
from mt_core.parallel.pipeline.schedule_tables import Action, Kind
from mt_core.parallel.pipeline.split_backward import backward_of_inputs
from mt_core.parallel.pipeline.stage import Activations, form_of, tensors_of

# -- the autograd graph of one micro-batch in one stage, from its input to its output ---------------------


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
        leaf_gradients = [_or_zeros(leaf.grad, leaf) for leaf in self._leaves]
        self._free()
        return leaf_gradients

    def backward_input(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the leaves only; `backward_weight` has to follow."""
        if not self._leaves:  # the first stage: no input gradient, so the whole backward pass runs in backward_weight
            # Such schedules place BACKWARD_WEIGHT after every BACKWARD_INPUT, also in the first stage.
            self._weights = partial(self._backward_of_all, gradients)
            return []
        leaf_gradients, self._weights = backward_of_inputs(self._edges, gradients, self._leaves)
        return [_or_zeros(gradient, leaf) for gradient, leaf in zip(leaf_gradients, self._leaves, strict=True)]

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


Batch = Mapping[str, Tensor]
LossFn = Callable[[Any, Batch], Tensor]
"""(output of the last stage, micro-batch) -> the micro-batch's part of the loss, a scalar"""
Place = tuple[int, int]
"""Stage, micro-batch."""


class Recorder(Protocol):
    def span(self, action: Action) -> AbstractContextManager[object]:
        """Context manager around an action; for a receive, around the wait."""
        ...


@dataclass(frozen=True)
class StageRunner:
    """The state of this rank's stages that is common to all runs."""

    run_stage: Callable[[int, Activations | None, Batch], Any]
    """(stage, activations of the previous stage, micro-batch) -> activations for the next stage, or the output"""
    ranks_of_stages: Sequence[int]
    exchange: P2PCommunicator
    recorder: Recorder

    @property
    def last_stage(self) -> int:
        return len(self.ranks_of_stages) - 1

    def shares_rank(self, stage: int, neighbour: int) -> bool:
        return self.ranks_of_stages[stage] == self.ranks_of_stages[neighbour]


class ScheduleRun:
    """The micro-batches of one run, and the activations and gradients in flight between stages."""

    def __init__(self, rank: StageRunner, micro_batches: Sequence[Batch], share: LossFn, *, training: bool) -> None:
        self.rank, self.micro_batches, self.share, self.training = rank, micro_batches, share, training
        # Training adds the fp32 losses of one step. Evaluation sums over many batches and stays in fp64.
        self.total = torch.zeros((), dtype=torch.float32 if training else torch.float64, device=rank.exchange.device)
        # Both sides of a transfer have the micro-batch, so they derive equal keys without communication.
        self.shapes = [tuple((name, x.shape) for name, x in sorted(batch.items())) for batch in micro_batches]
        # From the forward pass until the last backward action of the micro-batch in the stage.
        self.graphs: dict[Place, StageGraph] = {}
        # Posted receives, by the action that posted them; waited for where the tensors are needed.
        self.receiving: dict[Action, Incoming] = {}
        # Results between the action that computes them and the send action that follows in the plan.
        self.to_send: dict[Action, Any] = {}
        self.inputs: dict[Place, Activations] = {}  # from the previous stage, on the same rank
        self.output_gradients: dict[Place, Sequence[Tensor]] = {}  # from the next stage, on the same rank

    def run(self, actions: Sequence[Action]) -> Tensor:
        """Sum of the loss contributions that were computed on this rank."""
        for action in actions:
            HANDLERS[action.kind](self, action)
        # A send may outlast the last action of its rank.
        self.rank.exchange.finish()
        return self.total

    def forward(self, action: Action) -> None:
        place = action.stage, action.micro_batch
        batch, hidden = self.micro_batches[action.micro_batch], self._input(place)
        with self.rank.recorder.span(action):
            output = self.rank.run_stage(action.stage, hidden, batch)
            # The graph then ends in the loss, and only what its backward pass needs of the logits is kept.
            if action.stage == self.rank.last_stage:
                output = self.share(output, batch)
                self.total += output.detach()
        if self.training:
            self.graphs[place] = StageGraph(hidden, output)
        self._pass_on(place, output)

    def backward(self, action: Action) -> None:
        place = action.stage, action.micro_batch
        # Outside the span: the wait is recorded as that of the receive, not as computation.
        gradients = self._output_gradients(place)
        graph = self.graphs.pop(place)
        with self.rank.recorder.span(action):
            leaf_gradients = graph.backward(gradients)
        self._pass_back(place, leaf_gradients)

    def backward_input(self, action: Action) -> None:
        place = action.stage, action.micro_batch
        # The graph is kept, in contrast to backward(): backward_weight needs it.
        gradients = self._output_gradients(place)
        with self.rank.recorder.span(action):
            leaf_gradients = self.graphs[place].backward_input(gradients)
        self._pass_back(place, leaf_gradients)

    def backward_weight(self, action: Action) -> None:
        graph = self.graphs.pop((action.stage, action.micro_batch))
        with self.rank.recorder.span(action):
            graph.backward_weight()

    def send_forward(self, action: Action) -> None:
        to = self.rank.ranks_of_stages[action.stage + 1]
        with self.rank.recorder.span(action):
            self.rank.exchange.send_hidden(self.to_send.pop(action), to, self._key(action.stage + 1, action))

    def receive_forward(self, action: Action) -> None:
        sender = self.rank.ranks_of_stages[action.stage - 1]
        self.receiving[action] = self.rank.exchange.receive_hidden(sender, self._key(action.stage, action))

    def send_backward(self, action: Action) -> None:
        to = self.rank.ranks_of_stages[action.stage - 1]
        with self.rank.recorder.span(action):
            self.rank.exchange.send_gradients(self.to_send.pop(action), to)

    def receive_backward(self, action: Action) -> None:
        sender = self.rank.ranks_of_stages[action.stage + 1]
        # Gradients have the shapes of the activations that this rank sent, so no header is needed.
        form = self.graphs[action.stage, action.micro_batch].output_form
        self.receiving[action] = self.rank.exchange.receive_gradients(form, sender)

    def _input(self, place: Place) -> Activations | None:
        stage, _ = place
        if stage == 0:
            return None
        if place in self.inputs:
            return self.inputs.pop(place)
        incoming, tensors = self._received(Action(Kind.RECEIVE_FORWARD, *place))
        for tensor, form in zip(tensors, incoming.form.tensors, strict=True):
            # Received tensors are leaves. An activation that needs no gradient at its sender gets none sent back
            # either.
            tensor.requires_grad_(form.has_gradient)
        return incoming.form.pack(tensors)

    def _pass_on(self, place: Place, output: Activations) -> None:
        stage, number = place
        if stage == self.rank.last_stage:
            return
        if self.rank.shares_rank(stage, stage + 1):
            # The graph is cut here as it is between ranks: each stage has a backward action of its own in the table.
            self.inputs[stage + 1, number] = as_leaves(output)
        else:
            self.to_send[Action(Kind.SEND_FORWARD, *place)] = output

    def _output_gradients(self, place: Place) -> Sequence[Tensor]:
        stage, _ = place
        if stage == self.rank.last_stage:
            # d loss / d loss.
            return [torch.ones((), dtype=self.graphs[place].output_form.tensors[0].dtype, device=self.total.device)]
        if place in self.output_gradients:
            return self.output_gradients.pop(place)
        return self._received(Action(Kind.RECEIVE_BACKWARD, *place))[1]

    def _pass_back(self, place: Place, gradients: Sequence[Tensor]) -> None:
        stage, number = place
        if stage == 0:
            return
        if self.rank.shares_rank(stage, stage - 1):
            self.output_gradients[stage - 1, number] = gradients
        else:
            self.to_send[Action(Kind.SEND_BACKWARD, *place)] = gradients

    def _received(self, action: Action) -> tuple[Incoming, list[Tensor]]:
        incoming = self.receiving.pop(action)
        with self.rank.recorder.span(action):
            return incoming, incoming.wait()

    def _key(self, receiving_stage: int, action: Action) -> Hashable:
        # training: activations require a gradient in training and none in evaluation, which is part of the header.
        return receiving_stage, self.training, self.shapes[action.micro_batch]


HANDLERS: Mapping[Kind, Callable[[ScheduleRun, Action], None]] = {
    Kind.FORWARD: ScheduleRun.forward,
    Kind.BACKWARD: ScheduleRun.backward,
    Kind.BACKWARD_INPUT: ScheduleRun.backward_input,
    Kind.BACKWARD_WEIGHT: ScheduleRun.backward_weight,
    Kind.SEND_FORWARD: ScheduleRun.send_forward,
    Kind.RECEIVE_FORWARD: ScheduleRun.receive_forward,
    Kind.SEND_BACKWARD: ScheduleRun.send_backward,
    Kind.RECEIVE_BACKWARD: ScheduleRun.receive_backward,
}
