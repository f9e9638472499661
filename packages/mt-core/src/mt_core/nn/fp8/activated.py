"""The result of a gated activation, or the gradient of its input, as a matrix that is computed where it is cast."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mt_core.nn.kernels.reference.activation import FusedActivation, activation


@dataclass(frozen=True)
class Activated:
    """activation(x) [rows, F], or with `grad` [rows, F] the gradient of x [rows, 2F], in the dtype of x.

    x: [rows, 2F], contiguous, the gate half first. turned: the transpose of that.
    """

    x: Tensor
    name: FusedActivation
    grad: Tensor | None = None
    turned: bool = False

    @property
    def width(self) -> int:
        """F"""
        return self.x.shape[1] // 2

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = len(self.x), self.width if self.grad is None else 2 * self.width
        return (columns, rows) if self.turned else (rows, columns)

    def t(self) -> Activated:
        return replace(self, turned=not self.turned)

    def compute(self) -> Tensor:
        matrix = self._activation() if self.grad is None else self._gradient(self.grad)
        return matrix.t() if self.turned else matrix

    def _activation(self) -> Tensor:
        return activation(self.x, None, self.name)

    def _gradient(self, grad: Tensor) -> Tensor:
        # Called in backward passes, where gradients are off; the graph of this one operation is freed with them.
        with torch.enable_grad():
            x = self.x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(activation(x, None, self.name), x, grad)
        return gradient


Matrix = Tensor | Activated


def computed(matrix: Matrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.compute()
