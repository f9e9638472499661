"""Attention by other packages' and torch's GPU kernels, as far as a CPU shows: masks, documents, what is refused."""

from __future__ import annotations

import gc
import re
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from tests.covering import covering
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.interfaces import AttentionRequest
from mt_core.nn import attention
from mt_core.nn.attention import AttentionPattern, eager_attention
from mt_core.nn.attention_backends import cudnn, flash, flex
from mt_core.nn.attention_backends.flash import FlashAttention
from mt_core.nn.attention_backends.flex import FlexAttention
from mt_core.nn.attention_backends.patterns import PerPattern, find_documents, window_sides
from mt_core.nn.build_context import automatic_backend
from mt_core.plugins import load_plugins

SEGMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 2, 2]])


def qkv(queries: int = 9, keys: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, queries, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


PATTERNS = {
    "causal": AttentionPattern(),
    "full": AttentionPattern(causal=False),
    "window": AttentionPattern(window=3),
    "window both ways": AttentionPattern(causal=False, window=3),
    "wide window": AttentionPattern(window=100),
    "alibi": AttentionPattern(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0])),
    "documents": AttentionPattern(segment_ids=SEGMENTS),
    "documents in a window": AttentionPattern(segment_ids=SEGMENTS, window=2),
    "padding": AttentionPattern(causal=False, key_padding=torch.arange(9)[None] < torch.tensor([[9], [5]])),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "softcap"), covering(list(PATTERNS), [None, 2.0]))
def test_flex_says_the_same_as_the_written_out_mask(name: str, softcap: float | None) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    core = FlexAttention(flex_attention, create_block_mask, softcap)
    for queries in (9, 4):
        q, k, v = qkv(queries)
        pattern = PATTERNS[name]
        out, lse = core.with_lse(q, k, v, pattern)
        assert torch.allclose(out, eager_attention(logit_softcap=softcap)(q, k, v, pattern, 0.0), atol=1e-5)
        scores = torch.einsum("bsnd,btnd->bnst", q, k.repeat_interleave(2, 2)) / 4
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        masked = scores + pattern.additive_mask(queries, 9, torch.float32, q.device)
        assert torch.allclose(lse, masked.logsumexp(-1), atol=1e-5)


@pytest.mark.slow
def test_flex_with_a_bias_that_differs_by_sample() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = qkv()
    for batch in (1, 2):
        pattern = AttentionPattern(causal=False, bias=torch.randn(batch, 4, 9, 9))
        out = FlexAttention(flex_attention, create_block_mask)(q, k, v, pattern, 0.0)
        assert torch.allclose(out, eager_attention()(q, k, v, pattern, 0.0), atol=1e-5)


def test_documents_begin_where_ids_change_and_where_rows_do() -> None:
    documents = find_documents(SEGMENTS)
    assert documents.starts.tolist() == [0, 4, 9, 11, 16, 18]
    assert documents.starts.dtype == torch.int32
    assert documents.longest == 9
    assert find_documents(torch.zeros(3, 2)).starts.tolist() == [0, 2, 4, 6]


def test_window_sides() -> None:
    assert window_sides(AttentionPattern()) == (-1, 0)
    assert window_sides(AttentionPattern(causal=False)) == (-1, -1)
    assert window_sides(AttentionPattern(window=3)) == (2, 0)
    assert window_sides(AttentionPattern(causal=False, window=3)) == (2, 2)


class Recorder:
    """Stands in for the package: computes by documents with the eager reference, records what it was called with."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.options = options
        before, _ = options["window_size"]
        pattern = AttentionPattern(causal=options["causal"], window=None if before < 0 else before + 1)
        return eager_attention()(q, k, v, pattern, 0.0)

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, longest: int, key_longest: int,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert torch.equal(starts, key_starts)
        assert longest == key_longest >= int(starts.diff().max())
        parts = []
        for start, stop in zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True):
            parts.append(self.attend(*(x[None, start:stop] for x in (q, k, v)), **options)[0])
        return torch.cat(parts), torch.zeros(1)


@pytest.mark.parametrize("name", ["causal", "full", "window", "window both ways", "documents", "documents in a window"])
def test_flash_attention_gets_the_pattern(name: str) -> None:
    recorder = Recorder()
    core = FlashAttention(recorder.attend, recorder.attend_packed, {"deterministic": True, "softcap": 30.0})
    q, k, v = qkv()
    out = core(q, k, v, PATTERNS[name], 0.0)
    assert torch.allclose(out, eager_attention()(q, k, v, PATTERNS[name], 0.0), atol=1e-5)
    assert recorder.options["deterministic"] is True
    assert recorder.options["softcap"] == 30.0
    assert "dropout_p" not in recorder.options
    core(q, k, v, PATTERNS["alibi"], 0.1)
    assert recorder.options["dropout_p"] == 0.1
    assert torch.equal(recorder.options["alibi_slopes"], PATTERNS["alibi"].alibi_slopes)


@pytest.mark.parametrize(
    ("pattern", "queries", "words"),
    [
        (AttentionPattern(bias=torch.zeros(1, 4, 9, 9)), 9, "has bias"),
        (AttentionPattern(key_padding=torch.ones(2, 9, dtype=torch.bool)), 9, "has key_padding"),
        (AttentionPattern(segment_ids=SEGMENTS), 1, "documents with a bias or with other queries than keys"),
    ],
)
def test_flash_attention_leaves_nothing_out_in_silence(pattern: AttentionPattern, queries: int, words: str) -> None:
    core = FlashAttention(Recorder().attend, Recorder().attend_packed, {})
    with pytest.raises(ConfigError, match=words):
        core(*qkv(queries), pattern, 0.0)


def request(**changes: Any) -> AttentionRequest:
    given: dict[str, Any] = {
        "device_type": "cuda", "dtype": "bfloat16", "head_dim": 128, "num_heads": 8, "num_query_groups": 2,
        "causal": True, "segments": False, "bias": False, "dropout": 0.0, "deterministic": False,
    }  # fmt: skip
    return AttentionRequest(**{**given, **changes})


@pytest.mark.parametrize(
    ("supports", "changes", "words"),
    [
        (cudnn.supports_cudnn, {"device_type": "cpu"}, "cuDNN runs on cuda, not on cpu"),
        (cudnn.supports_cudnn, {"dtype": "float32"}, "float16 and bfloat16, not in float32"),
        (cudnn.supports_cudnn, {"head_dim": 192}, "up to 128 wide, not 192"),
        (cudnn.supports_cudnn, {"deterministic": True}, "deterministic runs need eager"),
        (cudnn.supports_cudnn, {"logit_softcap": 50.0}, "no soft cap"),
        (flex.supports_flex, {"device_type": "cpu"}, "cuda only, not on cpu"),
        (flex.supports_flex, {"dropout": 0.1}, "no dropout"),
        (flex.supports_flex, {"head_dim": 8}, "at least 16 wide, not 8"),
        (flash.supports_flash_2, {}, "flash-attn is not installed"),
        (flash.supports_flash_3, {}, "FlashAttention 3 .* is not installed"),
    ],
)
def test_refusals_say_why(supports: Any, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    answer = supports(request(**changes))
    assert isinstance(answer, str)
    assert re.search(words, answer)


def test_flash_attention_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "find_spec", lambda name: ModuleSpec(name, None, origin=f"{name}.py"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert flash.supports_flash_2(request(dropout=0.1, bias=True)) is True
    assert "no dropout" in str(flash.supports_flash_3(request(dropout=0.1)))
    assert "no bias" in str(flash.supports_flash_3(request(bias=True)))
    assert "Hopper" in str(flash.supports_flash_3(request()))
    assert "ALiBi is for causal" in str(flash.supports_flash_2(request(bias=True, causal=False)))
    assert "multiples of 8" in str(flash.supports_flash_2(request(head_dim=100)))
    assert "no dropout beside a soft cap" in str(flash.supports_flash_2(request(dropout=0.1, logit_softcap=50.0)))


def test_what_is_derived_from_a_pattern_is_made_once_and_goes_with_it() -> None:
    made = []
    known: PerPattern[int] = PerPattern()
    pattern = AttentionPattern()
    for key in ("a", "b", "a"):
        known.get(pattern, key, lambda: made.append(1) or len(made))
    assert known.get(pattern, "b", lambda: 99) == 2
    assert len(made) == 2
    del pattern
    gc.collect()
    assert not known._known


# -- auto ---------------------------------------------------------------------------------------------

HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("expected", "capability", "installed", "asked"),
    [
        ("cudnn", HOPPER, ("flash_attn_interface", "flash_attn"), {}),
        ("flash_attn_3", HOPPER, ("flash_attn_interface", "flash_attn"), {"head_dim": 256}),
        ("flash_attn_2", HOPPER, ("flash_attn",), {"head_dim": 256}),
        ("flash_attn_2", AMPERE, ("flash_attn",), {}),
        ("sdpa", AMPERE, (), {}),
        ("sdpa", AMPERE, ("flash_attn",), {"causal": False}),
        ("sdpa", AMPERE, ("flash_attn",), {"bias": True}),
        ("sdpa", HOPPER, (), {"dtype": "float32"}),
        ("flex", HOPPER, (), {"logit_softcap": 30.0}),
        ("flash_attn_3", HOPPER, ("flash_attn_interface",), {"logit_softcap": 50.0, "head_dim": 256, "window": 4096}),
        ("flash_attn_2", AMPERE, ("flash_attn",), {"logit_softcap": 50.0, "deterministic": True}),
        ("eager", AMPERE, ("flash_attn",), {"logit_softcap": 50.0, "dropout": 0.1}),
        ("eager", HOPPER, ("flash_attn",), {"logit_softcap": 50.0, "device_type": "cpu"}),
        ("flex", HOPPER, ("flash_attn_interface", "flash_attn"), {"sinks": True}),
        ("cudnn", HOPPER, (flash.DISTRIBUTION, "flash_attn_interface"), {}),
        ("flash_attn_4", (10, 0), (flash.DISTRIBUTION, "flash_attn"), {"deterministic": True}),
        ("eager", HOPPER, (), {"deterministic": True}),
        ("sdpa", HOPPER, ("flash_attn",), {"device_type": "cpu"}),
        ("eager", HOPPER, (), {"device_type": "cpu", "sinks": True}),
    ],
)
def test_auto_takes_the_fastest_that_serves(expected, capability, installed, asked, monkeypatch) -> None:
    spec = ModuleSpec("package", None, origin="somewhere")
    monkeypatch.setattr(flash, "find_spec", lambda name: spec if name in installed else None)
    monkeypatch.setattr(flash, "is_installed", lambda: flash.DISTRIBUTION in installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    name, refused = automatic_backend(request(**asked), load_plugins())
    assert name == expected
    assert all(refused.values())


def test_groups_are_not_repeated_where_kernels_take_them(monkeypatch) -> None:
    """On a CPU, as on a GPU: what is kept for the backward pass has 2 heads of keys and not 4."""
    monkeypatch.setattr(attention, "serves_groups", lambda q, mask: mask is None)
    q, k, v = (x.requires_grad_() for x in qkv())
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.data_ptr()), x)[1], lambda x: x):
        out = attention.sdpa_attention(q, k, v, AttentionPattern(), 0.0)
    assert {q.data_ptr(), k.data_ptr(), v.data_ptr()} <= set(kept)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    exact = eager_attention()(q, k, v, AttentionPattern(), 0.0)
    for found, expected in zip(grads, torch.autograd.grad(exact.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
