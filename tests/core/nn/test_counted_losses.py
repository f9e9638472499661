"""linear_cross_entropy_sum projects the positions whose loss counts, and no others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mt_core.nn.embedding import VocabRange
from mt_core.nn.loss import LinearCrossEntropySum, Unprojected, counted_rows, weighted_sum
from mt_core.parallel.context import ParallelContext

ROWS, HIDDEN, IDS = 32, 8, 37


def outcome(weights: torch.Tensor):
    """Loss, gradients of hidden and weight; and how many rows were multiplied by the LM head."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, ROWS // 2, HIDDEN, generator=generator, requires_grad=True)
    matrix = torch.randn(IDS, HIDDEN, generator=generator, requires_grad=True)
    labels = torch.randint(IDS, (2, ROWS // 2), generator=generator)
    ctx = ParallelContext()
    loss, projected = LinearCrossEntropySum(ctx), []
    kernel = loss.kernel

    def counting(rows, *more, **options):
        projected.append(len(rows))
        return kernel(rows, *more, **options)

    loss.kernel = counting
    batch = {"labels": labels, "loss_mask": weights}
    ours = weighted_sum(loss(Unprojected(hidden, matrix, VocabRange(0, IDS), ctx), batch), weights) / 7.0
    found = (ours.detach(), *torch.autograd.grad(ours, (hidden, matrix)))
    logits = (hidden @ matrix.T).flatten(0, 1)
    plain = (F.cross_entropy(logits, labels.flatten(), reduction="none") * weights.flatten()).sum() / 7.0
    return found, (plain.detach(), *torch.autograd.grad(plain, (hidden, matrix))), projected


@pytest.mark.parametrize(("counted", "projected"), [(32, 32), (30, 32), (16, 16), (1, 1), (0, 1)])
def test_the_sum_and_its_gradients_are_those_of_all_positions(counted, projected) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    weights = ((order < counted) * torch.linspace(0.5, 1.5, ROWS)).view(2, -1)
    found, expected, rows = outcome(weights)
    assert rows == [projected]
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)


def test_a_device_is_not_waited_for() -> None:
    assert counted_rows(torch.ones(4, device="meta")) is None
