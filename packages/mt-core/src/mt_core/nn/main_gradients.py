"""Gradients of 16-bit weights that are added up in fp32 by the matrix product that makes them.

Without this, a backward pass makes each weight's gradient in 16 bits, and a hook adds it to an fp32 sum: one more
tensor of the weight's size, one more pass over memory, and a rounding to 16 bits for each micro-batch. Main weights
give a weight its `MainGradient`; whoever multiplies by the weight asks for it and tells autograd that there is nothing
to accumulate (Megatron's gradient_accumulation_fusion).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MainGradient:
    """total: fp32 [out, in], of experts [E, out, in], the sum over uses and micro-batches. Whoever made it zeroes and
    reduces it."""

    total: Tensor

    @torch.no_grad()
    def add_product(self, rows: Tensor, inputs: Tensor) -> None:
        """total += rows^T inputs, with no rounding but fp32's. rows [n, out], inputs [n, in], both of the same 16 bits.

        CUDA multiplies 16 bits and adds in fp32 in one kernel; torch has no such product for a CPU, which multiplies
        the same numbers in fp32.
        """
        if self.total.is_cuda:
            torch.addmm(self.total, rows.t(), inputs, out_dtype=torch.float32, out=self.total)
        else:
            self.total.addmm_(rows.t().float(), inputs.float())

    @torch.no_grad()
    def add_multiple(self, gradient: Tensor, factor: Tensor) -> None:
        """total += factor * gradient, of one that had to be made apart. gradient [out, in], factor [], both fp32."""
        self.total.addcmul_(gradient, factor)

    def matrices(self) -> Iterator[MainGradient]:
        """Of each matrix of total [E, out, in]."""
        return (MainGradient(matrix) for matrix in self.total)


def give_main_gradient(weight: nn.Parameter, total: Tensor) -> None:
    """From now on products add the weight's gradient to `total`. A weight that is not in 16 bits is left alone.

    total: fp32, of the weight's shape.
    """
    if weight.dtype in SIXTEEN_BITS:
        weight.main_gradient = MainGradient(total)  # type: ignore[attr-defined]


def main_gradient_of(weight: Tensor) -> MainGradient | None:
    """None: autograd accumulates what the product gives it. So it does in compiled layers, whose backward pass may
    write to nothing but its results."""
    return None if torch.compiler.is_compiling() else getattr(weight, "main_gradient", None)


def with_main_gradient(weight: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """view(weight), with view(total) as its main gradient if the weight has one.

    view: gives some of a tensor's elements or another shape of it, in the same memory.
    """
    part, main = view(weight), main_gradient_of(weight)
    if main is not None:
        part.main_gradient = MainGradient(view(main.total))  # type: ignore[attr-defined]
    return part


def call_after_gradient(weight: nn.Parameter, call: Callable[[], None]) -> Node:
    """Call whenever a backward pass is through with a weight: once, after the last of its uses.

    Hooks on the weight itself may hear only of gradients that autograd accumulates. The node that is returned has to
    be kept: the hook lives as long.
    """
    node = get_gradient_edge(weight).node
    node.register_hook(lambda inputs, outputs: call())
    return node
