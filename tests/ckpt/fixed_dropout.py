"""Dropout with masks that do not depend on the order in which they are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def dropout_by_feature() -> Iterator[None]:
    """Replaces torch's dropout: the first elements of the last dimension are dropped, a share of p and at least one.

    A model that applies dropout to the parts of a sequence one after the other is the same as one that applies it to
    the whole sequence, and one with another p, or with dropout elsewhere, is not.
    """
    drawn = nn.functional.dropout

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0.0 < p < 1.0:
            return drawn(input, p, training, inplace)  # no element or all of them, or torch's own error
        size = input.shape[-1]
        kept = torch.arange(size, device=input.device) >= max(1, round(p * size))
        return input * kept / (1 - p)

    nn.functional.dropout = dropout
    try:
        yield
    finally:
        nn.functional.dropout = drawn
