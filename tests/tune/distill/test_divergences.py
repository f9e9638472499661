"""Divergences compared with plain torch over the whole vocabulary, and with bounds that have to hold."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.parallel.context import SINGLE
from mt_tune.distill.divergences import Divergence, most_probable, top_k_of

VOCABULARY = 11


def logits(seed: int) -> Tensor:
    return torch.randn(2, 3, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float() * 2


def expected(kind: str, student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    p, q = (F.softmax(x.double() / temperature, -1) for x in (teacher, student))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a.log() - b.log())).sum(-1)

    mixed = beta * p + (1 - beta) * q
    return {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": beta * kl(p, mixed) + (1 - beta) * kl(q, mixed),
    }[kind]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_value_and_gradient_are_those_of_the_formula(kind: str) -> None:
    student, teacher = logits(1).requires_grad_(), logits(2)
    divergence = Divergence(kind, 0.3, 1.7)  # type: ignore[arg-type]
    value = divergence.of_logits(student, teacher, SINGLE)
    value.sum().backward()
    reference = logits(1).requires_grad_()
    wanted = expected(kind, reference, teacher, 0.3, 1.7)
    wanted.sum().backward()
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.grad, reference.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_tail_bin_bounds_the_divergence_from_below_and_is_exact_for_all_tokens(kind: str) -> None:
    student, teacher = logits(1), logits(2)
    divergence = Divergence(kind, 0.3, 1.7)  # type: ignore[arg-type]
    whole = divergence.of_logits(student, teacher, SINGLE)
    bounds = [
        divergence.of_top_k(student, top_k_of(teacher, k, 1.7, 0, SINGLE), "bin", 0, SINGLE)
        for k in (1, 3, 6, VOCABULARY)
    ]
    # A coarser partition of the tokens never has the larger divergence.
    for coarse, fine in zip(bounds[:-1], bounds[1:], strict=True):
        assert (coarse <= fine + 1e-5).all()
    assert (bounds[0] < whole - 1e-3).all()
    torch.testing.assert_close(bounds[-1], whole, rtol=1e-4, atol=1e-5)


def test_renormalized_and_dropped_tails_are_what_they_say() -> None:
    student, teacher = logits(1), logits(2)
    top = top_k_of(teacher, 4, 1.0, 0, SINGLE)
    chosen = student.gather(-1, top.ids), teacher.gather(-1, top.ids)
    divergence = Divergence()
    renormalized = divergence.of_top_k(student, top, "renormalize", 0, SINGLE)
    torch.testing.assert_close(renormalized.double(), expected("forward_kl", *chosen, 0.5, 1.0), rtol=1e-4, atol=1e-6)
    p, q = (F.log_softmax(x, -1).gather(-1, top.ids) for x in (teacher, student))
    dropped = divergence.of_top_k(student, top, "drop", 0, SINGLE)
    torch.testing.assert_close(dropped, (p.exp() * (p - q)).sum(-1), rtol=1e-4, atol=1e-6)


def test_the_most_probable_token_is_the_first_of_equal_ones() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    assert most_probable(x, 5, SINGLE).tolist() == [6, 5]
