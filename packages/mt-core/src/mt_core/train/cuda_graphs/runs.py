"""Which micro-batches use CUDA graphs, and when these are captured.

The first steps with a form of arguments (shapes, dtypes, constants) run eagerly. One pass of the last of them is
recorded, and its calls are captured as a pool slot before the next step. If all slots are in use, because other
micro-batches are between their forward and backward pass, a micro-batch runs eagerly, and one more slot is captured
before the next step: after a few steps there are as many slots as the pipeline schedule has micro-batches in flight.
When the addresses of weights or their requires_grad change, all graphs are captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.main_grad import MainGrad, main_gradient_of
from mt_core.train.cuda_graphs.capture import Form, GraphedCall, Recorder, form_of, replaced, tensors_in

# -- calls of consecutive layers, for one micro-batch at a time --------------------------------------
#
# The graphs of a slot are captured in the order of replay: forward from the first layer to the last, backward from the
# last to the first. They can therefore share one memory pool: temporary memory of a layer is reused by the next. A
# layer reads its input from the output buffer of the layer before, and writes its input gradient to the buffer that the
# layer before reads, without copies. Slots share no memory, so micro-batches in different slots may interleave in any
# order.


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
            for came, output in zip(call.outputs, graphed.outputs, strict=True):
                # Later layers read this output in place.
                known[id(came)] = output.detach().requires_grad_(came.requires_grad)
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
            candidates = [readers.get(id(known[id(came)]), []) for came in call.outputs]
            graphed.capture_backward([gradients[0] if len(gradients) == 1 else None for gradients in candidates])
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
        for static, tensor in zip(inputs, tensors, strict=True):
            # Identity of the caller's tensor is enough within one pass: it is not written between the layers that read
            # it.
            if static.data_ptr() != tensor.data_ptr() and self._fed.get(id(static)) is not tensor:
                static.copy_(tensor)
                self._fed[id(static)] = tensor


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


MOST_FORMS = 4
"""Maximum number of forms with graphs, as each has its own memory. Micro-batches of further forms run eagerly."""


class CapturedCall:
    """Records the calls of one pass. Tensors are identified by id(), so references are held until the pass ends."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self._known: dict[int, Any] = {}
        self._held: list[Any] = []

    def call(
        self, function: Callable[..., Any], parameters: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        form = form_of((args, kwargs))
        # id() of a freed tensor may be given to a new one.
        self._held.append((args, kwargs))
        own_args, own_kwargs = replaced((args, kwargs), _detached, self._known)
        result = function(*args, **kwargs)
        self._held.append(result)
        outputs = tensors_in(replaced(result, _detached, self._known))
        self.calls.append(RecordedCall(function, own_args, own_kwargs, parameters, outputs, form))
        return result

    def end(self) -> None:
        self._held, self._known = [], {}


@dataclass
class FormState:
    """State of the passes whose first layer gets arguments of one form. steps: completed steps with such passes."""

    lanes: list[GraphPoolSlot] = field(default_factory=list)
    steps: int = 0
    was_seen: bool = False
    record: CapturedCall | None = None


class LayerRun:
    """Layers that run one after another, with no other layers between them.

    Replaces their `forward`. Hooks still run; evaluation and passes without gradients are not graphed.
    """

    def __init__(self, layers: Sequence[nn.Module], recorder: Recorder, warmup_steps: int) -> None:
        self.layers, self.recorder, self.warmup_steps = list(layers), recorder, warmup_steps
        self.forms: dict[Form, FormState] = {}
        # Graphs read weights at the addresses of their capture.
        self._memory = self._memory_of_weights()
        self._lane: GraphPoolSlot | None = None
        self._record: CapturedCall | None = None
        self._next = 0
        for place, layer in enumerate(self.layers):
            # forward and not __call__: hooks on the layer (gathers of weights) run outside of the graphs.
            layer.forward = partial(self._call, place, layer.forward)

    def begin_step(self) -> bool:
        """Called between steps, with no micro-batch in flight. Returns whether graphs were captured.

        Raises ConfigError for layers that are not called one after another.
        """
        if self._memory != (now := self._memory_of_weights()):
            self._memory, self.forms = now, {}
        self._lane = self._record = None
        captured = [self._begin_step(state) for state in self.forms.values()]
        return any(captured)

    def _begin_step(self, state: FormState) -> bool:
        state.steps += state.was_seen
        state.was_seen = False
        # A step that failed between forward and backward left its slots in use.
        for lane in state.lanes:
            lane.release()
        record, state.record = state.record, None
        if record is None:
            return False
        if len(record.calls) < len(self.layers):
            raise ConfigError(
                f"train.cuda_graphs=blocks: of {len(self.layers)} layers in a row a micro-batch went through the first "
                f"{len(record.calls)} only, or with something between them; set train.cuda_graphs=none"
            )
        for main in self._main_gradients():
            # A captured product either writes or adds, and replays the same in every micro-batch, so it has to add to
            # zeros.
            main.zero_at_once()
        with unchanged_buffers(self.layers):
            state.lanes.append(GraphPoolSlot(record.calls, self.recorder))
        return True

    def _call(self, place: int, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.layers[place].training or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if place == 0:
            self._begin_pass(args, kwargs)
        # A layer that is called out of turn (an early exit, a loop) is not what was recorded.
        follows, self._next = place == self._next, place + 1
        if follows and self._record is not None:
            return self._recorded(place, plain, args, kwargs)
        if follows and self._lane is not None and self._lane.serves(place, args, kwargs):
            return self._lane.call(place, args, kwargs)
        self._lane = self._record = None
        return plain(*args, **kwargs)

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._lane = self._record = None
        self._next = 0
        # warmup_steps = 2: step 1 runs eagerly; in step 2 the first pass is recorded; before step 3 it is captured as a
        # slot.
        state = self._state_of(args, kwargs)
        if state is None:
            return
        state.was_seen = True
        self._lane = next((lane for lane in state.lanes if lane.is_free), None)
        if self._lane is not None:
            self._lane.begin()
        # No free slot: this pass runs eagerly and is recorded, at most one in a step and form.
        elif state.record is None and state.steps >= self.warmup_steps - 1:
            self._record = state.record = CapturedCall()

    def _state_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FormState | None:
        try:
            form = form_of((args, kwargs))
        except TypeError as unknown:
            raise ConfigError(
                f"train.cuda_graphs=blocks: {type(self.layers[0]).__name__} is called with a {unknown}, of which a "
                "graph does not record what changes from call to call; set train.cuda_graphs=none"
            ) from None
        if form not in self.forms and len(self.forms) < MOST_FORMS:
            self.forms[form] = FormState()
        return self.forms.get(form)

    def _recorded(self, place: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._record is not None
        result = self._record.call(plain, list(self.layers[place].parameters()), args, kwargs)
        if place == len(self.layers) - 1:
            self._record.end()
        return result

    def _main_gradients(self) -> Iterator[MainGrad]:
        for layer in self.layers:
            yield from filter(None, map(main_gradient_of, layer.parameters()))

    def _memory_of_weights(self) -> list[tuple[int, bool]]:
        return [(p.data_ptr(), p.requires_grad) for layer in self.layers for p in layer.parameters()]


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def unchanged_buffers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Restores buffers that layers update in a pass (such as the FP8 amax history) after warm-up and capture."""
    before = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


class BlockGraphs:
    """The graphed layer runs of this process."""

    def __init__(self, runs: Sequence[LayerRun]) -> None:
        self.runs = list(runs)

    def begin_step(self) -> str | None:
        """Call it before each step. Returns a message for the user if graphs were captured."""
        captured = [run.begin_step() for run in self.runs]
        if not any(captured):
            return None
        layers = sum(len(run.layers) for run in self.runs)
        lanes = max(len(state.lanes) for run in self.runs for state in run.forms.values())
        return f"CUDA graphs of {layers} layers captured, for {lanes} micro-batch{'es' * (lanes > 1)} at a time"
