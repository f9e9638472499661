"""The calls of consecutive layers as graphs, for one micro-batch at a time.

Within a lane graphs are captured in the order of every pass: forward from the first layer to the last, backward from
the last to the first. So they share memory: what a layer only needs for a moment, the next may use. A layer reads its
input where the layer before left it, and leaves the gradient where that one looks for it; nothing is copied between.
Lanes share nothing, so that micro-batches in several of them may take turns in any order.
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
    """A call of a layer as it came. Tensors are detached; those that were one are one, also from call to call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: Sequence[Tensor]
    outputs: Sequence[Tensor]
    form: Form


class Lane:
    """Graphs of the recorded calls, which follow one another."""

    def __init__(self, recorded: Sequence[RecordedCall], recorder: Recorder) -> None:
        for call in recorded:
            _run_aside(call, recorder)
        pool = recorder.new_pool()
        known: dict[int, Any] = {}
        self.forms = [call.form for call in recorded]
        self.calls: list[GraphedCall] = []
        for call in recorded:
            args, kwargs = replaced((call.args, call.kwargs), _fixed, known)
            graphed = GraphedCall(call.function, args, kwargs, call.parameters, recorder, pool)
            for came, own in zip(call.outputs, graphed.outputs, strict=True):
                # What reads this output reads it where it is.
                known[id(came)] = own.detach().requires_grad_(came.requires_grad)
            self.calls.append(graphed)
        self._capture_backward(recorded, known)
        self.is_free = True
        self._fed: dict[int, Tensor] = {}
        backwards = [call for call in self.calls if call.has_backward]
        if backwards:
            backwards[0].after_backward = self.release
        self._frees_itself = not backwards

    def _capture_backward(self, recorded: Sequence[RecordedCall], known: dict[int, Any]) -> None:
        """From the last call to the first; an output that one call reads has its gradient where that call leaves it."""
        readers: dict[int, list[Tensor | None]] = {}
        for call, graphed in zip(reversed(recorded), reversed(self.calls), strict=True):
            if not graphed.has_backward:
                continue
            found = [readers.get(id(known[id(came)]), []) for came in call.outputs]
            graphed.capture_backward([gradients[0] if len(gradients) == 1 else None for gradients in found])
            for tensor, gradient in zip(graphed.inputs, graphed.gradients, strict=False):
                readers.setdefault(id(tensor), []).append(gradient)

    def begin(self) -> None:
        self.is_free = False
        self._fed = {}

    def release(self) -> None:
        """A pass is over: nothing of it is needed any more."""
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
        """Copy what is elsewhere; once where several layers read it."""
        for own, given in zip(inputs, tensors, strict=True):
            if own.data_ptr() != given.data_ptr() and self._fed.get(id(own)) is not given:
                own.copy_(given)
                self._fed[id(own)] = given


def _fixed(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_(tensor.requires_grad)


def _run_aside(call: RecordedCall, recorder: Recorder) -> None:
    """Forward and backward once, for what libraries set up at a first call; results are dropped."""
    args, kwargs = replaced((call.args, call.kwargs), _fixed, {})
    wanted = [x for x in (*tensors_in((args, kwargs)), *call.parameters) if x.requires_grad]
    with torch.enable_grad(), recorder.aside():
        outputs = [x for x in tensors_in(call.function(*args, **kwargs)) if x.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.zeros_like(x) for x in outputs], allow_unused=True)
