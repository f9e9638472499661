"""Sliding windows and soft caps of the attention backends, against the formula in fp64 with loops over positions."""

from __future__ import annotations

import math

import pytest
import torch

from mt_core.interfaces import AttentionRequest
from mt_core.nn.attention import AttentionPattern, build_eager, eager_attention, sdpa_attention, supports_sdpa

BACKENDS = {"eager": eager_attention(), "sdpa": sdpa_attention}


def random_qkv(queries: int, keys: int):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, length, heads, 8, generator=generator) for length, heads in ((queries, 4), (keys, 2), (keys, 2))
    ]


def by_hand(q, k, v, window=None, cap=None, segment_ids=None):
    batch, queries, heads, size = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    out = torch.zeros_like(q, dtype=torch.float64)
    for b in range(batch):
        for n in range(heads):
            for s in range(queries):
                at = keys - queries + s
                seen = [
                    t
                    for t in range(at + 1)
                    if (window is None or at - t < window)
                    and (segment_ids is None or segment_ids[b, t] == segment_ids[b, at])
                ]
                scores = torch.stack(
                    [q[b, s, n].double() @ k[b, t, n // group].double() / math.sqrt(size) for t in seen]
                )
                if cap is not None:
                    scores = cap * (scores / cap).tanh()
                weights = scores.softmax(0)
                out[b, s, n] = sum(w * v[b, t, n // group].double() for w, t in zip(weights, seen, strict=True))
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 3, 7, 8])
@pytest.mark.parametrize("queries", [1, 2, 7])
def test_a_window_hides_what_is_too_far_back(backend, window, queries) -> None:
    q, k, v = random_qkv(queries, 7)
    out = BACKENDS[backend](q, k, v, AttentionPattern(window=window), 0.0)
    torch.testing.assert_close(out.double(), by_hand(q, k, v, window), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_within_documents(backend) -> None:
    q, k, v = random_qkv(7, 7)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]])
    pattern = AttentionPattern(segment_ids=segments)
    narrow = BACKENDS[backend](q, k, v, pattern.within(2), 0.0)
    torch.testing.assert_close(narrow.double(), by_hand(q, k, v, 2, segment_ids=segments), atol=1e-6, rtol=1e-5)
    wide = BACKENDS[backend](q, k, v, pattern, 0.0)
    torch.testing.assert_close(wide.double(), by_hand(q, k, v, segment_ids=segments), atol=1e-6, rtol=1e-5)


def test_layers_of_one_kind_share_their_mask() -> None:
    pattern = AttentionPattern()
    assert pattern.within(None) is pattern
    assert pattern.within(3) is pattern.within(3)
    assert pattern.within(3).additive_mask(5, 5, torch.float32, torch.device("cpu")) is pattern.within(3)._mask


def test_a_window_that_reaches_everything_costs_no_mask() -> None:
    pattern = AttentionPattern(window=7)
    sdpa_attention(*random_qkv(7, 7), pattern, 0.0)
    assert pattern._mask is None


def request(**keys) -> AttentionRequest:
    common = {"device_type": "cpu", "dtype": "float32", "head_dim": 8, "num_heads": 4, "num_query_groups": 2}
    return AttentionRequest(**common, causal=True, segments=False, bias=False, dropout=0.0, deterministic=False, **keys)


def test_eager_caps_scores_as_configured() -> None:
    q, k, v = random_qkv(5, 7)
    core = build_eager(request(logit_softcap=0.5, window=3))
    out = core(3 * q, k, v, AttentionPattern(window=3), 0.0)
    torch.testing.assert_close(out.double(), by_hand(3 * q, k, v, 3, cap=0.5), atol=1e-6, rtol=1e-5)
    uncapped = build_eager(request())(3 * q, k, v, AttentionPattern(window=3), 0.0)
    assert (out - uncapped).abs().max() > 0.1


def test_sdpa_says_that_it_has_no_cap() -> None:
    assert supports_sdpa(request(window=3)) is True
    assert "soft cap" in supports_sdpa(request(logit_softcap=50.0))
