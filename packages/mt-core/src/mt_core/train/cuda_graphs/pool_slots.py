"""The calls of consecutive layers as CUDA graphs, for one micro-batch at a time.

The graphs of a slot are captured in the order of replay: forward from the first layer to the last, backward from the
last to the first. They can therefore share one memory pool: temporary memory of a layer is reused by the next. A layer
reads its input from the output buffer of the layer before, and writes its input gradient to the buffer that the layer
before reads, without copies. Slots share no memory, so micro-batches in different slots may interleave in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.train.cuda_graphs.capture import GraphedCall, Recorder
from mt_core.train.cuda_graphs.structure import Form, form_of, replaced, tensors_in


@dataclass(frozen=True)
class RecordedCall:
    """The recorded arguments of a layer call. Tensors are detached; aliases are preserved, also between calls."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: Sequence[Tensor]
    outputs: Sequence[Tensor]
    form: Form


class GraphPoolSlot:
    """The graphs of consecutive recorded calls."""

    def __init__(self, recorded: Sequence[RecordedCall], recorder: Recorder) -> None:
        # All warm-ups before the first capture: their temporary memory is not that of the pool.
        for call in recorded:
            _run_aside(call, recorder)
        pool = recorder.new_pool()
        # id of a recorded tensor -> the static tensor in its place. An output of one layer that is the input of the
        # next is thereby the same static tensor.
        known: dict[int, Any] = {}
        self.forms = [call.form for call in recorded]
        self.calls: list[GraphedCall] = []
        for call in recorded:
            args, kwargs = replaced((call.args, call.kwargs), _fixed, known)
            graphed = GraphedCall(call.function, args, kwargs, call.parameters, recorder, pool)
            for came, own in zip(call.outputs, graphed.outputs, strict=True):
                # Later layers read this output in place.
                known[id(came)] = own.detach().requires_grad_(came.requires_grad)
            self.calls.append(graphed)
        self._capture_backward(recorded, known)
        self.is_free = True
        self._fed: dict[int, Tensor] = {}
        backwards = [call for call in self.calls if call.has_backward]
        # Backward passes run from the last call to the first, so after that of the first call the micro-batch is done.
        if backwards:
            backwards[0].after_backward = self.release
        self._frees_itself = not backwards

    def _capture_backward(self, recorded: Sequence[RecordedCall], known: dict[int, Any]) -> None:
        """From the last call to the first. An output with one reader uses that reader's input gradient buffer."""
        readers: dict[int, list[Tensor | None]] = {}
        for call, graphed in zip(reversed(recorded), reversed(self.calls), strict=True):
            if not graphed.has_backward:
                continue
            # The input gradients of the calls that read this output. With several readers autograd sums them into a
            # tensor of its own, which replay_backward() copies.
            found = [readers.get(id(known[id(came)]), []) for came in call.outputs]
            graphed.capture_backward([gradients[0] if len(gradients) == 1 else None for gradients in found])
            # strict=False: gradients of the parameters follow those of the inputs.
            for tensor, gradient in zip(graphed.inputs, graphed.gradients, strict=False):
                readers.setdefault(id(tensor), []).append(gradient)

    def begin(self) -> None:
        self.is_free = False
        self._fed = {}

    def release(self) -> None:
        """The backward pass of the micro-batch is done: the slot is free for another one."""
        self.is_free = True
        self._fed = {}

    def serves(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return form_of((args, kwargs)) == self.forms[place]

    def call(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graphed, tensors = self.calls[place], tensors_in((args, kwargs))
        self._feed(graphed.inputs, tensors)
        result = graphed(tensors)
        if self._frees_itself and place == len(self.calls) - 1:
            self.release()
        return result

    @torch.no_grad()
    def _feed(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy inputs that are not in static memory; once per tensor, even if several layers read it."""
        for own, given in zip(inputs, tensors, strict=True):
            # Identity of the caller's tensor is enough within one pass: it is not written between the layers that read
            # it.
            if own.data_ptr() != given.data_ptr() and self._fed.get(id(own)) is not given:
                own.copy_(given)
                self._fed[id(own)] = given


def _fixed(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_(tensor.requires_grad)


def _run_aside(call: RecordedCall, recorder: Recorder) -> None:
    """Warm-up: run forward and backward once outside of a capture, and discard the results."""
    args, kwargs = replaced((call.args, call.kwargs), _fixed, {})
    wanted = [x for x in (*tensors_in((args, kwargs)), *call.parameters) if x.requires_grad]
    with torch.enable_grad(), recorder.aside():
        outputs = [x for x in tensors_in(call.function(*args, **kwargs)) if x.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.zeros_like(x) for x in outputs], allow_unused=True)
