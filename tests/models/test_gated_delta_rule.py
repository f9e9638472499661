"""The gated delta rule: chunks against the recurrence and the formula in fp64, documents, gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mt_models.blocks.chunked_delta_rule import chunked_delta_rule
from mt_models.blocks.fla_delta_rule import document_bounds
from mt_models.blocks.gated_delta_rule import DeltaInputs, recurrent_delta_rule

LENGTH = 23


def inputs(length: int = LENGTH, dtype: torch.dtype = torch.float64) -> DeltaInputs:
    """2 sequences, 3 key heads of 5 channels, 6 value heads of 7."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, length, *shape, generator=generator, dtype=dtype)

    # Decays from nearly none to nearly all of the state.
    return DeltaInputs(draw(3, 5), draw(3, 5), draw(6, 7), -draw(6).exp(), draw(6).sigmoid())


def by_formula(x: DeltaInputs) -> Tensor:
    """Each head and position by itself, as the paper writes it: S = S (exp(g) (I - beta k k^T)) + beta v k^T."""
    out = torch.empty_like(x.v)
    for batch in range(x.v.shape[0]):
        for head in range(x.v.shape[2]):
            state = torch.zeros(x.v.shape[3], x.k.shape[3], dtype=torch.float64)
            for t in range(x.v.shape[1]):
                q, k = (y[batch, t, head // 2] for y in (x.q, x.k))
                q, k = (y / (y @ y + 1e-6).sqrt() for y in (q, k))
                g, beta = x.g[batch, t, head], x.beta[batch, t, head]
                kept = g.exp() * (torch.eye(5, dtype=torch.float64) - beta * torch.outer(k, k))
                state = state @ kept + beta * torch.outer(x.v[batch, t, head], k)
                out[batch, t, head] = state @ q / 5**0.5
    return out


def test_the_recurrence_is_the_formula() -> None:
    x = inputs(9)
    torch.testing.assert_close(recurrent_delta_rule(x)[0], by_formula(x), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("size", [1, 4, 8, 23, 64])
def test_chunks_are_the_recurrence(size: int) -> None:
    x = inputs()
    expected, state = recurrent_delta_rule(x)
    found, last = chunked_delta_rule(x, chunk_size=size)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(last, state, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_chunks_are_those_of_the_recurrence(size: int, packed: bool) -> None:
    """Also that of a state which both begin with, through the outputs and the state that they end with."""
    leaves = [x.requires_grad_() for x in (*inputs(11), torch.randn(2, 6, 5, 7, dtype=torch.float64))]
    ids = torch.tensor([[0] * 3 + [1] * 8, [0] * 6 + [4, 2, 2, 2, 2]]) if packed else None
    weights = torch.randn(2, 11, 6, 7, dtype=torch.float64), torch.randn(2, 6, 5, 7, dtype=torch.float64)
    gradients = []
    for rule in (recurrent_delta_rule, partial(chunked_delta_rule, chunk_size=size)):
        outputs = rule(DeltaInputs(*leaves[:5]), state=leaves[5], segment_ids=ids)
        gradients.append(torch.autograd.grad(outputs, leaves, weights))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)


def test_a_sequence_in_two_parts_goes_on_from_the_state() -> None:
    x = inputs()
    whole, last = chunked_delta_rule(x, chunk_size=8)
    first, state = chunked_delta_rule(DeltaInputs(*(y[:, :10] for y in x)), chunk_size=8)
    second, end = chunked_delta_rule(DeltaInputs(*(y[:, 10:] for y in x)), chunk_size=8, state=state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(end, last, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("size", [4, 8, 32])
def test_documents_are_apart(size: int) -> None:
    """Lengths 3, 9, 1, 10 and 7, 7, 5, 4: within chunks, over several, and of one position."""
    x = inputs()
    lengths = ((3, 9, 1, 10), (7, 7, 5, 4))
    ids = torch.stack([torch.repeat_interleave(torch.arange(4), torch.tensor(row)) for row in lengths])
    found, recurrent = chunked_delta_rule(x, chunk_size=size, segment_ids=ids), recurrent_delta_rule(x, segment_ids=ids)
    alone = []
    for batch, row in enumerate(lengths):
        parts = zip(*(y[batch : batch + 1].split(row, 1) for y in x), strict=True)
        alone.append(torch.cat([recurrent_delta_rule(DeltaInputs(*part))[0] for part in parts], 1))
    for out in (found, recurrent):
        torch.testing.assert_close(out[0], torch.cat(alone), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found[1], recurrent[1], atol=1e-12, rtol=1e-10)
    assert document_bounds(ids).tolist() == [0, 3, 12, 13, 23, 30, 37, 42, 46]


def test_bf16_inputs_are_computed_in_fp32() -> None:
    x = inputs(LENGTH, torch.float32)
    rounded = DeltaInputs(*(y.bfloat16() for y in x[:3]), x.g, x.beta.bfloat16())
    exact = DeltaInputs(*(y.float() for y in rounded))
    found, state = chunked_delta_rule(rounded, chunk_size=8)
    assert found.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(state, chunked_delta_rule(exact, chunk_size=8)[1], atol=1e-6, rtol=1e-6)
