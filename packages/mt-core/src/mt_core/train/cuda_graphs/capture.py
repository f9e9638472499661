"""One call of a layer as two graphs, of its forward and its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_core.train.cuda_graphs.structure import replaced, tensors_in


class Graph(Protocol):
    def replay(self) -> None:
        """Do again what was captured, with the numbers that are in its memory now."""
        ...


class Recorder(Protocol):
    """Captures graphs on a device."""

    def new_pool(self) -> Any:
        """Memory for graphs that are replayed in the order in which they were captured."""
        ...

    def capture(self, pool: Any) -> AbstractContextManager[Graph]:
        """What is launched within becomes the graph; nothing of it runs yet."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """Around a run of the same on the stream of captures, for what libraries set up at a first call."""
        ...


class CudaRecorder:
    """torch.cuda.CUDAGraph on a stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self, pool: Any) -> Iterator[Graph]:
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog, pinned memory of readers) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            yield graph

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)


class GraphedCall:
    """A function over tensors that stay where they are: `inputs`, `parameters`, `outputs` and their gradients.

    args, kwargs: arguments whose tensors are the inputs, leaves of autograd. The forward pass is captured at once, the
    backward pass by `capture_backward`: in a pool, graphs are captured in the order in which they will be replayed.
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
        with torch.enable_grad(), recorder.capture(pool) as self._forward:
            self._output = function(*args, **kwargs)
        self.outputs = tensors_in(self._output)
        self._differentiable = [output.requires_grad for output in self.outputs]
        self.after_backward: Callable[[], None] = _nothing

    @property
    def has_backward(self) -> bool:
        trained = any(x.requires_grad for x in (*self.inputs, *self.parameters))
        return trained and any(self._differentiable)

    def capture_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """gradients: for each output memory where its gradient will be; None: some of its own."""
        self.output_gradients = [
            torch.empty_like(output) if given is None else given
            for output, given in zip(self.outputs, gradients, strict=True)
        ]
        wanted = [tensor for tensor in (*self.inputs, *self.parameters) if tensor.requires_grad]
        with self._recorder.capture(self._pool) as self._backward:
            found = torch.autograd.grad(
                [output for output, needed in zip(self.outputs, self._differentiable, strict=True) if needed],
                wanted,
                [g for g, needed in zip(self.output_gradients, self._differentiable, strict=True) if needed],
                allow_unused=True,
            )
        by_tensor = dict(zip(map(id, wanted), found, strict=True))
        self.gradients = [by_tensor.get(id(tensor)) for tensor in (*self.inputs, *self.parameters)]
        # Memory that only the backward pass read is free for what is captured next.
        self._output = replaced(self._output, Tensor.detach, {})
        self.outputs = tensors_in(self._output)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """tensors: those that stand for the inputs, whose numbers are in the inputs already."""
        results = _Replay.apply(self, *tensors, *self.parameters)
        by_own = dict(zip(map(id, self.outputs), results, strict=True))
        return replaced(self._output, lambda own: by_own[id(own)], {})

    def replay_forward(self) -> tuple[Tensor, ...]:
        self._forward.replay()
        return tuple(output.detach() for output in self.outputs)

    def replay_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        for own, given, needed in zip(self.output_gradients, gradients, self._differentiable, strict=True):
            if needed and own.data_ptr() != given.data_ptr():
                own.copy_(given)
        self._backward.replay()
        self.after_backward()
        # These very tensors: as they are held here, autograd copies them where it would else keep their memory as the
        # gradient of a weight, to be overwritten by the next micro-batch.
        return self.gradients


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: GraphedCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        outputs = call.replay_forward()
        fixed = [own for own, needed in zip(outputs, call._differentiable, strict=True) if not needed]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *ctx.call.replay_backward(gradients)


def _nothing() -> None:
    pass
