"""Pipeline stages: what part of a model one holds, the interface of models that can be split, and the activations
between stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Stage:
    """A range of consecutive layers, by their indices in the whole model (from 0); may be empty.

    first: includes the modules before the layers (embedding). last: includes those after them (final norm, LM head).
    """

    layers: range
    first: bool = True
    last: bool = True


def whole(num_layers: int) -> Stage:
    """The only stage of a model without pipeline parallelism."""
    return Stage(range(num_layers))


@runtime_checkable
class Pipelined(Protocol):
    """A model that can run one stage at a time. Built with some stages, it has the parameters of those only,
    under the names that they have in the whole model."""

    def run_stage(self, stage: Stage, hidden: Any, **inputs: Tensor) -> Any:
        """The activations of the previous stage (None for the first) -> those for the next, or the output.

        inputs: the fields of the micro-batch that the model's `inputs` names; every stage gets all of them.
        """
        ...

    def stage_modules(self, stage: Stage) -> Iterable[nn.Module]:
        """The modules whose parameters the stage uses."""
        ...


# -- activations between stages: a tensor, or a tuple of tensors (such as decoder and encoder states) -----

Activations = Tensor | tuple[Tensor, ...]

# A fixed length, since the receiver posts its receive before it has seen anything of the message. 64 numbers hold 8
# tensors of 4 dimensions, and more of fewer.
HEADER_LENGTH = 64
# Numbered by position in the header; both ranks run the same code, so the order is no file format.
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class TensorForm:
    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


@dataclass(frozen=True)
class ActivationsForm:
    """Shapes, dtypes and requires_grad, which the receiver needs to allocate buffers."""

    tensors: tuple[TensorForm, ...]
    is_tuple: bool

    def pack(self, tensors: Sequence[Tensor]) -> Activations:
        return tuple(tensors) if self.is_tuple else tensors[0]

    def to_header(self) -> Tensor:
        """[HEADER_LENGTH] int64. Raises ValueError for more tensors or dimensions than it holds."""
        # is_tuple, number of tensors, then for each: dtype, has_gradient, number of dimensions, the dimensions. Zeros
        # follow.
        numbers = [int(self.is_tuple), len(self.tensors)]
        for tensor in self.tensors:
            numbers += [DTYPES.index(tensor.dtype), int(tensor.has_gradient), len(tensor.shape), *tensor.shape]
        if len(numbers) > HEADER_LENGTH:
            raise ValueError(
                f"hidden states of {len(self.tensors)} tensors are too many to send between stages: {self}"
            )
        return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)))

    @classmethod
    def from_header(cls, header: Tensor) -> ActivationsForm:
        numbers = iter(header.tolist())
        is_tuple, count = bool(next(numbers)), next(numbers)
        return cls(tuple(_read_tensor_form(numbers) for _ in range(count)), is_tuple)


def _read_tensor_form(numbers: Iterator[int]) -> TensorForm:
    dtype, has_gradient, dimensions = DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
    return TensorForm(tuple(next(numbers) for _ in range(dimensions)), dtype, has_gradient)


def form_of(hidden: Activations) -> ActivationsForm:
    forms = (TensorForm(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors_of(hidden))
    return ActivationsForm(tuple(forms), isinstance(hidden, tuple))


def tensors_of(hidden: Activations) -> tuple[Tensor, ...]:
    return hidden if isinstance(hidden, tuple) else (hidden,)
