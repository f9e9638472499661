"""The dropout with which training is compared where only the order of random numbers differs."""

from __future__ import annotations

import pytest
import torch
from tests.ckpt.fixed_dropout import dropout_by_feature
from torch import Tensor, nn


def trained(values: Tensor, p: float) -> Tensor:
    with dropout_by_feature():
        dropped: Tensor = nn.Dropout(p)(values)
    return dropped


def test_hand_worked() -> None:
    # 0.25 of four elements: one is dropped, and the others are divided by 0.75.
    assert trained(torch.full((2, 4), 3.0), 0.25).tolist() == [[0.0, 4.0, 4.0, 4.0]] * 2


def test_parts_are_as_the_whole() -> None:
    values = torch.randn(2, 6, 8)
    parts = [trained(part, 0.1) for part in values.chunk(3, dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), trained(values, 0.1))


@pytest.mark.parametrize("other", [0.0, 0.05, 0.2, 1.0])
def test_another_probability_is_seen(other: float) -> None:
    """With few elements too, of which both drop as many."""
    values = torch.ones(2, 4)
    assert not torch.allclose(trained(values, 0.1), trained(values, other))


def test_torch_has_its_own_dropout_afterwards() -> None:
    drawn = nn.functional.dropout
    trained(torch.ones(4), 0.1)
    assert nn.functional.dropout is drawn
