"""The choice of keys by which models are compared where scores are equal."""

from __future__ import annotations

import torch
from tests.ckpt.first_of_equal import first_of_equal


def test_hand_worked() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0, 3.0]])
    with first_of_equal():
        highest = scores.topk(4, dim=-1)
        lowest = scores.T.topk(2, dim=0, largest=False)
    assert highest.indices.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]
    assert highest.values.tolist() == [[2.0, 2.0, 1.0, 0.0], [3.0] * 4]
    assert lowest.indices.tolist() == [[0, 0], [2, 1]]


def test_masked_scores_behind_change_nothing() -> None:
    scores = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    masked = torch.cat([scores, torch.full((30,), float("-inf"))])
    with first_of_equal():
        assert torch.equal(scores.topk(4).indices, masked.topk(4).indices)


def test_torch_has_its_own_choice_afterwards() -> None:
    chosen = torch.Tensor.topk
    with first_of_equal():
        assert torch.Tensor.topk is not chosen
    assert torch.Tensor.topk is chosen
