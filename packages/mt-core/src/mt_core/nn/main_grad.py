"""main_grad: gradients of 16-bit weights, accumulated in fp32 by the matrix product that computes them.

Without this, a backward pass computes each weight's gradient in 16 bits, and a hook adds it to an fp32 sum: one more
tensor of the weight's size, one more pass over memory, and a rounding to 16 bits per micro-batch. Master weights
attach a `MainGrad` to a weight; a layer that multiplies by the weight adds to it and returns no gradient to autograd
(Megatron's gradient_accumulation_fusion).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from mt_core._torch_compat import zero_all_

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class MainGrad:
    """total: fp32 [out, in], of experts [E, out, in], the sum over uses and micro-batches. Whoever made it clears and
    reduces it.

    After `clear_all` the first gradient is written over what is there, so that zeros are neither written nor read.
    """

    def __init__(self, total: Tensor, whole: MainGrad | None = None) -> None:
        """whole: that of which `total` is a view, which begins where it begins."""
        self._total = total
        self._whole = whole
        self._stands_for_zeros = False
        self._is_zeroed_at_once = False

    @property
    def _is_cleared(self) -> bool:
        """Whether `_total` stands for zeros, whatever it holds."""
        return (self._whole or self)._stands_for_zeros

    @property
    def total(self) -> Tensor:
        """To be added to; zeros are written if it was cleared."""
        memory, is_cleared = self.take()
        return memory.zero_() if is_cleared else memory

    def take(self) -> tuple[Tensor, bool]:
        """The memory of `total`, and whether all of it has to be written, without a look at what it holds. Else it is
        added to."""
        # Views share one flag: the first use of any of them ends the cleared state of all.
        whole, is_cleared = self._whole or self, self._is_cleared
        whole._stands_for_zeros = False
        # The rest (rows of padding) is not written by the caller, so its zeros have to be.
        if is_cleared and self._total.numel() < whole._total.numel():
            whole._total.view(-1)[self._total.numel() :].zero_()
        return self._total, is_cleared

    def view(self, view: Callable[[Tensor], Tensor]) -> MainGrad:
        """The first rows of it, or it in another shape. What is written there is written here; other rows stay zero."""
        return MainGrad(view(self._total), self._whole or self)

    def zero_at_once(self) -> None:
        """From now on `clear_all` writes zeros: passes that are recorded once and repeated (CUDA graphs) always add."""
        self._is_zeroed_at_once = True
        self.settle()

    def settle(self) -> None:
        """Make the memory of `total` hold its value, for code that reads it by itself."""
        _ = self.total

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        """total += gradient, of any dtype."""
        total, is_cleared = self.take()
        if is_cleared:
            total.copy_(gradient)
        else:
            total.add_(gradient)

    @torch.no_grad()
    def add_product(self, rows: Tensor, inputs: Tensor) -> None:
        """total += rows^T inputs, with no rounding but fp32's. rows [n, out], inputs [n, in], both of the same 16 bits.

        CUDA multiplies 16 bits and adds in fp32 in one kernel; torch has no such product for a CPU, which multiplies
        the same numbers in fp32.
        """
        # The first product of a step writes, later ones add: Megatron's gradient_accumulation_fusion zeroes the buffer
        # instead.
        if self._is_cleared:
            self.set_product(rows, inputs)
        elif self._total.device.type != "cpu":
            # out is the summand: one kernel, no second tensor of the weight's size.
            torch.addmm(self._total, rows.t(), inputs, out_dtype=torch.float32, out=self._total)
        else:
            self._total.addmm_(rows.t().float(), inputs.float())

    @torch.no_grad()
    def set_product(self, rows: Tensor, inputs: Tensor) -> None:
        """total = rows^T inputs, as add_product to zeros, which are neither written nor read."""
        total, _ = self.take()
        if total.device.type != "cpu":
            torch.mm(rows.t(), inputs, out_dtype=torch.float32, out=total)
        else:
            torch.mm(rows.t().float(), inputs.float(), out=total)

    @torch.no_grad()
    def add_multiple(self, gradient: Tensor, factor: Tensor) -> None:
        """total += factor * gradient, of one that had to be made apart. gradient [out, in], factor [], both fp32."""
        total, is_cleared = self.take()
        if is_cleared:
            torch.mul(gradient, factor, out=total)
        else:
            total.addcmul_(gradient, factor)

    def matrices(self) -> Iterator[MainGrad]:
        """Main gradients of the matrices of total [E, out, in]."""
        return (MainGrad(matrix) for matrix in self.total)


def clear_all(mains: Collection[MainGrad]) -> None:
    """Make each of them zero. Those that `zero_at_once` names are zeroed in as few kernels as the device allows."""
    zeroed = [main._total for main in mains if main._is_zeroed_at_once]
    if zeroed:
        zero_all_(zeroed)
    for main in mains:
        main._stands_for_zeros = not main._is_zeroed_at_once


def attach_main_grad(weight: nn.Parameter, total: Tensor) -> MainGrad | None:
    """From now on products add the weight's gradient to `total`. A weight that is not in 16 bits is left alone: None.

    total: fp32, of the weight's shape.
    """
    if weight.dtype not in SIXTEEN_BITS:
        return None
    main = MainGrad(total)
    weight.main_grad = main  # type: ignore[attr-defined]
    return main


def main_gradient_of(weight: Tensor) -> MainGrad | None:
    """None: autograd accumulates what the product gives it. So it does in compiled layers, whose backward pass may
    write to nothing but its results."""
    return None if torch.compiler.is_compiling() else getattr(weight, "main_grad", None)


def with_main_gradient(weight: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """view(weight), with view(total) as its main gradient if the weight has one.

    view: gives the first rows of a tensor or another shape of it, in the same memory.
    """
    part, main = view(weight), main_gradient_of(weight)
    # An attribute of the view, as autograd's view does not carry that of its base.
    if main is not None:
        part.main_grad = main.view(view)  # type: ignore[attr-defined]
    return part


def call_after_gradient(weight: nn.Parameter, call: Callable[[], None]) -> Node:
    """Register a callback for the completion of a weight's gradient: called once per backward pass, after its last use.

    Hooks on the weight itself may fire only for gradients that autograd accumulates. Keep a reference to the returned
    node: the hook is removed with it.
    """
    # The AccumulateGrad node runs once a backward pass, when all uses have given their part, None included.
    node = get_gradient_edge(weight).node
    node.register_hook(lambda inputs, outputs: call())
    return node
