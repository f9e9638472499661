"""Activations between stages: a tensor, or a tuple of tensors (such as decoder and encoder states)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
