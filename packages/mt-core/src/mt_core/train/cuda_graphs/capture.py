"""One call of a layer as two CUDA graphs, of its forward and its backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# -- tensors nested in the arguments of a layer ------------------------------------------------------
#
# Arguments may be tensors, constants, and tuples, lists, dictionaries and plain objects of these (an attention pattern,
# rotary angles). Attributes that begin with an underscore are caches of the object and are left out.

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
Form = tuple[tuple[object, ...], ...]
"""Everything about the arguments but the values of their tensors. Calls with equal forms can share a graph."""


def tensors_in(value: object) -> list[Tensor]:
    """The tensors, in an order that the form determines."""
    return [leaf for _, leaf in _leaves(value, "") if isinstance(leaf, Tensor)]


def form_of(value: object) -> Form:
    return tuple(_described(path, leaf) for path, leaf in _leaves(value, ""))


def replaced(value: Any, put: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    """The same structure with put(tensor) for each tensor. Aliases are preserved.

    known: replacements of earlier calls, by id() of the original, which has to stay alive while `known` is used.
    """
    if isinstance(value, CONSTANTS):
        return value
    # Containers and constants have no identity that matters: only tensors and objects are looked up in `known`.
    if isinstance(value, tuple | list):
        parts = (replaced(part, put, known) for part in value)
        # A named tuple takes its fields one by one.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: replaced(part, put, known) for name, part in value.items()}
    if id(value) not in known:
        known[id(value)] = put(value) if isinstance(value, Tensor) else _rebuilt(value, put, known)
    return known[id(value)]


def _rebuilt(value: Any, put: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    parts = {name: replaced(part, put, known) for name, part in _parts(value).items()}
    # Without __init__, whose checks or derived fields may need the original tensors.
    new = copy.copy(value)
    # A cache of the original would hold tensors that are not static.
    forgotten = {field.name: _default(field) for field in _remembered(value)}
    for name, part in {**parts, **forgotten}.items():
        object.__setattr__(new, name, part)  # also of a frozen dataclass
    return new


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, (*CONSTANTS, Tensor)):
        yield path, value
        return
    # The type is a part of the form: a list and a tuple of the same tensors are different calls.
    yield path, type(value)
    for name, part in _parts(value).items():
        yield from _leaves(part, f"{path}.{name}")


def _described(path: str, leaf: object) -> tuple[object, ...]:
    if isinstance(leaf, Tensor):
        return path, leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return path, type(leaf), leaf


def _parts(value: object) -> Mapping[str, object]:
    """Raises TypeError for an argument type that a graph does not support."""
    if isinstance(value, tuple | list):
        return {str(number): part for number, part in enumerate(value)}
    if isinstance(value, dict):
        return value
    if callable(value) or isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        raise TypeError(type(value).__name__)
    return {name: part for name, part in vars(value).items() if not name.startswith("_")}


def _remembered(value: object) -> list[Field[Any]]:
    if not is_dataclass(value):
        return []
    return [field for field in fields(value) if field.name.startswith("_")]


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


class Graph(Protocol):
    def replay(self) -> None:
        """Launch the captured kernels on the current contents of the static memory."""
        ...


class Recorder(Protocol):
    """Captures graphs on a device."""

    def new_pool(self) -> Any:
        """A memory pool for graphs that are replayed in the order of their capture."""
        ...

    def capture(self, pool: Any) -> AbstractContextManager[Graph]:
        """Context manager: kernels launched within are captured and do not run."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """Context manager for a warm-up run on the capture stream: libraries allocate workspaces at a first call."""
        ...


def use_capture_stream(device: torch.device) -> None:
    """Make a new stream the current one of this thread, for all work from now on; capture is not allowed on the
    default stream.

    Called before hooks on gradients are registered. The nodes of autograd that these keep belong to the stream of their
    creation; a backward pass on another one would wait for it, which ends a capture, and would not wait for gradients
    that are undefined (those of weights with a main gradient).
    """
    torch.cuda.set_stream(torch.cuda.Stream(device))


class CudaRecorder:
    """torch.cuda.CUDAGraph. stream: of the captures, not the default one; default: a new one."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream or torch.cuda.Stream()

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self, pool: Any) -> Iterator[Graph]:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads (NCCL's watchdog, readers that pin memory) may call CUDA during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            yield graph

    @contextmanager
    def aside(self) -> Iterator[None]:
        # The current stream may still write what the warm-up reads, and may overwrite it afterwards.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)


class GraphedCall:
    """A function over static tensors: `inputs`, `parameters`, `outputs` and their gradients keep their addresses.

    args, kwargs: arguments whose tensors are the inputs, leaves of autograd. The forward pass is captured by the
    constructor, the backward pass by `capture_backward`: the graphs of a pool have to be captured in replay order,
    since a later graph may reuse the memory of an earlier one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Sequence[Tensor],
        recorder: Recorder,
        pool: Any,
    ) -> None:
        self._recorder, self._pool = recorder, pool
        self.inputs = tensors_in((args, kwargs))
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        # Autograd builds its graph during the capture; capture_backward() runs it once, captured, and keeps no node
        # afterwards.
        with torch.enable_grad(), recorder.capture(pool) as self._forward:
            self._output = function(*args, **kwargs)
        self.outputs = tensors_in(self._output)
        # Noted here, since the outputs are detached later.
        self._differentiable = [output.requires_grad for output in self.outputs]
        self.after_backward: Callable[[], None] = _nothing

    @property
    def has_backward(self) -> bool:
        trained = any(x.requires_grad for x in (*self.inputs, *self.parameters))
        return trained and any(self._differentiable)

    def capture_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """gradients: for each output the memory that will hold its gradient; None: allocate it."""
        self.output_gradients = [
            torch.empty_like(output) if gradient is None else gradient
            for output, gradient in zip(self.outputs, gradients, strict=True)
        ]
        wanted = [tensor for tensor in (*self.inputs, *self.parameters) if tensor.requires_grad]
        with self._recorder.capture(self._pool) as self._backward:
            # grad() and not backward(): gradients are returned as static tensors and .grad stays untouched.
            computed = torch.autograd.grad(
                [output for output, needed in zip(self.outputs, self._differentiable, strict=True) if needed],
                wanted,
                [g for g, needed in zip(self.output_gradients, self._differentiable, strict=True) if needed],
                allow_unused=True,
            )
        by_tensor = dict(zip(map(id, wanted), computed, strict=True))
        # None for tensors without a gradient, as autograd expects it of a Function.
        self.gradients = [by_tensor.get(id(tensor)) for tensor in (*self.inputs, *self.parameters)]
        # Drop the references to memory that only the backward pass read: the pool reuses it for the next captures.
        self._output = replaced(self._output, Tensor.detach, {})
        self.outputs = tensors_in(self._output)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """tensors: the caller's inputs, for autograd. Their values have already been copied into the static inputs."""
        # Parameters are passed too: autograd then returns their gradients and fires the hooks on them.
        results = _Replay.apply(self, *tensors, *self.parameters)
        replayed = dict(zip(map(id, self.outputs), results, strict=True))
        return replaced(self._output, lambda output: replayed[id(output)], {})

    def replay_forward(self) -> tuple[Tensor, ...]:
        self._forward.replay()
        # Function.apply marks its outputs as its own results, and needs a new tensor object at each call.
        return tuple(output.detach() for output in self.outputs)

    def replay_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        for static, gradient, needed in zip(self.output_gradients, gradients, self._differentiable, strict=True):
            # The next layer's graph may have written its input gradient to this memory already.
            if needed and static.data_ptr() != gradient.data_ptr():
                static.copy_(gradient)
        self._backward.replay()
        self.after_backward()
        # Return the static tensors themselves. The reference kept here makes autograd's AccumulateGrad copy them;
        # otherwise it would take over their memory as the weight's .grad, which the next replay overwrites.
        return self.gradients


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: GraphedCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        outputs = call.replay_forward()
        fixed = [output for output, needed in zip(outputs, call._differentiable, strict=True) if not needed]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *ctx.call.replay_backward(gradients)


def _nothing() -> None:
    pass
