"""Asynchronous point-to-point communication of activations and gradients between pipeline ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.parallel.context import Axis
from mt_core.parallel.pipeline.stage import HEADER_LENGTH, Activations, ActivationsForm, form_of, tensors_of
from mt_core.parallel.reductions import all_reduce_


@dataclass
class Incoming:
    """Tensors being received. `wait` returns when they have arrived."""

    form: ActivationsForm
    tensors: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass
class Outgoing:
    """Sends in flight, with references to their tensors, whose memory must not be reused before they complete."""

    works: list[dist.Work]
    tensors: list[Tensor]

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)


@dataclass
class P2PCommunicator:
    """Sends and receives of this rank along the pipeline axis.

    The first activations with a new `key` are preceded by a header with their shapes; the receiver assumes the same
    shapes for later ones with this key. The key is any value that both sides have and that determines the shapes.
    Construction is collective over the axis.
    """

    axis: Axis
    device: torch.device
    backward: Axis | None = None
    """Axis of gradients, where these have separate communicators; else `axis`."""
    _sent_forms: dict[Hashable, ActivationsForm] = field(default_factory=dict)
    _received_forms: dict[Hashable, ActivationsForm] = field(default_factory=dict)
    _outgoing: list[Outgoing] = field(default_factory=list)

    def __post_init__(self) -> None:
        for axis in {id(axis.group): axis for axis in (self.axis, self._backward) if axis.size > 1}.values():
            # NCCL creates a group's communicator lazily, at its first operation, in which all ranks have to take part.
            # A first send between two ranks would hang; hence a collective before it.
            all_reduce_(torch.zeros((), device=self.device), axis)

    @property
    def _backward(self) -> Axis:
        return self.axis if self.backward is None or self.backward.size == 1 else self.backward

    def send_hidden(self, hidden: Activations, to: int, key: Hashable) -> None:
        """Raises RuntimeError when activations with the same key differ in shape or dtype."""
        form = form_of(hidden)
        if key not in self._sent_forms:
            # A separate message: the receiver needs the shapes before it can allocate the buffers of the activations.
            self._send([form.to_header().to(self.device)], to, self.axis)
            self._sent_forms[key] = form
        elif form != self._sent_forms[key]:
            raise RuntimeError(
                f"a pipeline stage gave hidden states {form} where it gave {self._sent_forms[key]} for inputs of the "
                "same shapes; their shapes, dtypes and need of a gradient may depend on the shapes of the inputs only"
            )
        # Detached, so that a send in flight keeps the values only, and not the graph of the stage.
        self._send([tensor.detach() for tensor in tensors_of(hidden)], to, self.axis)

    def receive_hidden(self, sender: int, key: Hashable) -> Incoming:
        """Waits for the header, if there is one, but not for the tensors."""
        if key not in self._received_forms:
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self.device)
            # With NCCL wait() orders streams only; reading the header on the host then waits for the device. This
            # happens once a key, not once a micro-batch.
            for work in self._start(dist.irecv, [header], sender, self.axis):
                work.wait()
            self._received_forms[key] = ActivationsForm.from_header(header)
        form = self._received_forms[key]
        # Allocated at each receive: the tensors become inputs of the stage's graph and live until its backward pass.
        tensors = [
            torch.empty(tensor_form.shape, dtype=tensor_form.dtype, device=self.device) for tensor_form in form.tensors
        ]
        return Incoming(form, tensors, self._start(dist.irecv, tensors, sender, self.axis))

    def send_gradients(self, gradients: Sequence[Tensor], to: int) -> None:
        self._send(gradients, to, self._backward)

    def receive_gradients(self, form: ActivationsForm, sender: int) -> Incoming:
        """form: of the activations that were sent; gradients are received for those that require one."""
        tensors = [
            torch.empty(tensor_form.shape, dtype=tensor_form.dtype, device=self.device)
            for tensor_form in form.tensors
            if tensor_form.has_gradient
        ]
        return Incoming(form, tensors, self._start(dist.irecv, tensors, sender, self._backward))

    def finish(self) -> None:
        """Wait for all sends."""
        for outgoing in self._outgoing:
            for work in outgoing.works:
                work.wait()
        self._outgoing.clear()

    def _send(self, tensors: Sequence[Tensor], to: int, axis: Axis) -> None:
        # Completed sends are dropped here, so that memory is freed during the step and not only by finish().
        self._outgoing = [outgoing for outgoing in self._outgoing if not outgoing.is_done()]
        # contiguous() may copy: the copy is what is in flight and has to be kept.
        contiguous = [tensor.contiguous() for tensor in tensors]
        self._outgoing.append(Outgoing(self._start(dist.isend, contiguous, to, axis), contiguous))

    def _start(
        self, operation: Callable[..., dist.Work | None], tensors: list[Tensor], peer: int, axis: Axis
    ) -> list[dist.Work]:
        """peer: rank along the axis."""
        if not tensors:
            return []
        # One NCCL group call for all tensors of a message, on the communicator of the axis. Plain isend and irecv would
        # create a communicator for each pair of ranks.
        return dist.batch_isend_irecv(
            [dist.P2POp(operation, tensor, axis.ranks[peer], axis.group) for tensor in tensors]
        )
