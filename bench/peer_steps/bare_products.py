"""The matrix products of a step and nothing else: forward, gradient of the input, gradient of the weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Case
from torch import Tensor


def build(case: Case) -> tuple[Callable[[Tensor], float], int]:
    """Results are written where those of the step before stand. Experts have equally many tokens; attention's products
    are square, without softmax."""
    linears, attention = [_linear(*shape) for shape in _shapes(case)], _attention(case)

    @torch.no_grad()
    def step(ids: Tensor) -> float:
        for product in linears:
            product()
        for _ in range(case.layers):
            attention()
        return 0.0

    return step, 0


def _shapes(case: Case) -> list[tuple[int, int, int]]:
    """(rows, inputs, outputs) of each linear layer."""
    wide, copies = (2 * case.ffn if case.gated else case.ffn), max(case.experts, 1)
    rows = case.tokens * case.topk // case.experts if case.experts else case.tokens
    hidden = case.hidden
    layer = [(case.tokens, hidden, 3 * hidden), (case.tokens, hidden, hidden)]
    layer += [(rows, hidden, wide), (rows, case.ffn, hidden)] * copies
    return layer * case.layers + [(case.tokens, hidden, case.vocab)]


def _linear(rows: int, inputs: int, outputs: int) -> Callable[[], None]:
    x, weight, y = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.zeros(rows, outputs)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)

    def run() -> None:
        torch.mm(x, weight.T, out=y)
        torch.mm(y, weight, out=dx)
        torch.mm(y.T, x, out=dweight)

    return run


def _attention(case: Case) -> Callable[[], None]:
    q = torch.randn(case.batch * case.heads, case.sequence, case.hidden // case.heads)
    scores, out = torch.zeros(len(q), case.sequence, case.sequence), torch.zeros_like(q)

    def run() -> None:
        """Scores and their gradient; the output, and the gradients of queries, keys and values."""
        for _ in range(2):
            torch.bmm(q, q.transpose(1, 2), out=scores)
        for _ in range(4):
            torch.bmm(scores, q, out=out)

    return run
