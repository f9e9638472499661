"""The attention backends against the formula in fp64, written with loops over positions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.nn.attention import AttentionPattern, eager_attention, sdpa_attention

BACKENDS = {"eager": eager_attention(), "sdpa": sdpa_attention}


def by_hand(q, k, v, segment_ids=None, slopes=None):
    """[B, S, N, D] in fp64, one query at a time."""
    batch, queries, heads, size = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    out = torch.zeros_like(q, dtype=torch.float64)
    for b in range(batch):
        for n in range(heads):
            for s in range(queries):
                at = keys - queries + s
                seen = [t for t in range(at + 1) if segment_ids is None or segment_ids[b, t] == segment_ids[b, at]]
                scores = torch.stack(
                    [(q[b, s, n].double() @ k[b, t, n // group].double()) / math.sqrt(size) for t in seen]
                )
                if slopes is not None:
                    scores = scores - slopes[n].double() * torch.tensor([at - t for t in seen])
                weights = scores.softmax(0)
                out[b, s, n] = sum(w * v[b, t, n // group].double() for w, t in zip(weights, seen, strict=True))
    return out


def random_qkv(batch=2, queries=5, keys=5, heads=4, groups=2, size=8):
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return make(batch, queries, heads, size), make(batch, keys, groups, size), make(batch, keys, groups, size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_causal_attention_with_shared_key_heads(backend, groups) -> None:
    q, k, v = random_qkv(groups=groups)
    out = BACKENDS[backend](q, k, v, AttentionPattern(), 0.0)
    torch.testing.assert_close(out.double(), by_hand(q, k, v), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [1, 2])
def test_queries_behind_cached_keys(backend, queries) -> None:
    q, k, v = random_qkv(queries=queries, keys=6)
    out = BACKENDS[backend](q, k, v, AttentionPattern(), 0.0)
    torch.testing.assert_close(out.double(), by_hand(q, k, v), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_do_not_see_one_another(backend) -> None:
    q, k, v = random_qkv()
    segments = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    out = BACKENDS[backend](q, k, v, AttentionPattern(segment_ids=segments), 0.0)
    torch.testing.assert_close(out.double(), by_hand(q, k, v, segments), atol=1e-6, rtol=1e-5)
    k[0, :2] += 1.0
    again = BACKENDS[backend](q, k, v, AttentionPattern(segment_ids=segments), 0.0)
    assert torch.equal(out[0, 2:], again[0, 2:]), "the first document changed the second, to the last bit"


@pytest.mark.parametrize("backend", BACKENDS)
def test_alibi_lowers_scores_with_distance(backend) -> None:
    q, k, v = random_qkv()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    out = BACKENDS[backend](q, k, v, AttentionPattern(alibi_slopes=slopes), 0.0)
    torch.testing.assert_close(out.double(), by_hand(q, k, v, slopes=slopes), atol=1e-6, rtol=1e-5)


@given(st.integers(1, 3), st.integers(1, 9), st.sampled_from([(2, 1), (4, 4), (6, 3)]), st.booleans())
@settings(deadline=None, max_examples=25)
def test_the_backends_agree_with_gradients(batch, length, heads, packed) -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(batch, length, length, *heads))
    segments = (torch.arange(length)[None].expand(batch, -1) // 3) if packed else None
    results = []
    for attend in BACKENDS.values():
        out = attend(q, k, v, AttentionPattern(segment_ids=segments), 0.0)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("in_fp32", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_softmax_of_eager_is_in_fp32_if_set(monkeypatch, in_fp32, dtype) -> None:
    seen = []
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, dim: seen.append(x.dtype) or softmax(x, dim))
    q, k, v = (x.bfloat16() for x in random_qkv())
    out = eager_attention(softmax_in_fp32=in_fp32)(q, k, v, AttentionPattern(), 0.0)
    assert seen == [dtype]
    assert out.dtype == torch.bfloat16


def test_dropout_leaves_the_mean_and_is_off_at_zero() -> None:
    torch.manual_seed(0)
    q, k, v = random_qkv(batch=64, queries=8, keys=8)
    v = torch.ones_like(v)
    out = eager_attention()(q, k, v, AttentionPattern(), 0.5)
    assert out.std() > 0.1
    assert abs(out.mean() - 1) < 0.05
