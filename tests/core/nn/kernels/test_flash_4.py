"""FlashAttention 4 by a fake that has the signature of its functions: what it receives, and when it is not called."""

from __future__ import annotations

import re
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from tests.core.nn.kernels.test_attention_backends import PATTERNS, qkv, request
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionPattern, eager_attention
from mt_core.nn.attention_backends import flash
from mt_core.nn.attention_backends.flash import flash_attention_4, supports_flash_4
from mt_core.plugins import load_plugins
from mt_core.specs import ATTENTION_BACKENDS

Window = tuple[int | None, int | None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (None, None), learnable_sink: Tensor | None = None, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
) -> tuple[Tensor, None]:  # fmt: skip
    """flash_attn.cute.flash_attn_func, computed by the reference."""
    left, right = window_size
    assert left is None or left >= 0
    assert right in ((0, None) if causal else (left, None))
    pattern = AttentionPattern(causal=causal, window=None if left is None else left + 1)
    return eager_attention()(q, k, v, pattern, 0.0), None


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """flash_attn.cute.flash_attn_varlen_func, a document at a time."""
    assert cu_seqlens_q is not None
    assert cu_seqlens_q.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k >= int(cu_seqlens_q.diff().max())
    bounds = zip(cu_seqlens_q.tolist()[:-1], cu_seqlens_q.tolist()[1:], strict=True)
    parts = [attend(*(x[None, start:stop] for x in (q, k, v)), **options)[0][0] for start, stop in bounds]
    return torch.cat(parts), None


@pytest.mark.parametrize("name", ["causal", "full", "window", "window both ways", "documents", "documents in a window"])
def test_the_package_gets_the_pattern(name: str) -> None:
    core = flash_attention_4(attend, attend_packed, deterministic=True)
    q, k, v = qkv()
    out = core(q, k, v, PATTERNS[name], 0.0)
    assert torch.allclose(out, eager_attention()(q, k, v, PATTERNS[name], 0.0), atol=1e-5)


def test_what_depends_on_the_batch_is_refused() -> None:
    core = flash_attention_4(attend, attend_packed, deterministic=False)
    with pytest.raises(ConfigError, match="has key_padding"):
        core(*qkv(), PATTERNS["padding"], 0.0)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(flash, "is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (11, 0)])
def test_where_it_serves(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, capability)
    assert supports_flash_4(request()) is True
    assert supports_flash_4(request(segments=True, head_dim=64)) is True
    on_blackwell = capability >= (10, 0)
    assert (supports_flash_4(request(window=128)) is True) == on_blackwell
    assert (supports_flash_4(request(deterministic=True)) is True) == on_blackwell


@pytest.mark.parametrize(
    ("changes", "capability", "words"),
    [
        ({}, (8, 0), "Hopper or a data-centre Blackwell .* not 8.0"),
        ({}, (12, 0), "compute capability 9 to 11.* not 12.0"),
        ({"window": 128}, (9, 0), "no window before Blackwell"),
        ({"deterministic": True}, (9, 0), "no fixed order before Blackwell"),
        ({"dropout": 0.1}, (10, 0), "no dropout"),
        ({"bias": True}, (10, 0), "no bias"),
        ({"logit_softcap": 30.0}, (10, 0), "no soft cap"),
        ({"sinks": True}, (10, 0), "has no gradient"),
        ({"head_dim": 192}, (10, 0), "up to 128 wide, not 192"),
        ({"dtype": "float32"}, (10, 0), "not in float32"),
        ({"device_type": "cpu"}, (10, 0), "on cuda, not on cpu"),
    ],
)
def test_refusals_say_why(
    changes: dict[str, Any], capability: tuple[int, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, capability)
    answer = supports_flash_4(request(**changes))
    assert isinstance(answer, str)
    assert re.search(words, answer)


def test_it_is_registered_and_not_installed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "is_installed", lambda: False)
    spec = load_plugins()[ATTENTION_BACKENDS].get("flash_attn_4", key="model.attention_backend")
    assert "flash-attn-4) is not installed" in str(spec.supports.load()(request()))


def test_the_folder_of_version_4_is_not_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 alone makes `flash_attn` a package without code."""
    monkeypatch.setattr(flash, "find_spec", lambda name: ModuleSpec(name, None, is_package=True))
    assert flash.supports_flash_2(request()) == "flash-attn is not installed"
