"""Sinks: a softmax with one more score of each head, which stands for no key."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.interfaces import AttentionRequest
from mt_core.nn.attention import AttentionPattern, eager_attention, supports_eager, supports_sdpa
from mt_core.nn.attention_backends import cudnn, flash, flex
from mt_core.nn.attention_backends.flex import FlexAttention
from mt_core.nn.build_context import ModelBuildContext
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.plugins import load_plugins

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]])
PATTERNS = {
    "causal": AttentionPattern(),
    "window": AttentionPattern(window=3),
    "documents": AttentionPattern(segment_ids=SEGMENTS),
}


def tensors(queries: int, keys: int = 7) -> list[Tensor]:
    """q, k, v and sinks from far below the scores to far above them, and the gradient of the result."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, queries, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return [2 * q, k, v, torch.tensor([-20.0, 0.0, 1.5, 12.0]), torch.randn(q.shape, generator=generator)]


def by_hand(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, pattern: AttentionPattern) -> Tensor:
    """The score of the sink stands in a column of its own, whose weight is then left out."""
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(q.shape[-1])
    scores = scores + pattern.additive_mask(q.shape[1], k.shape[1], torch.float32, q.device).to(q.dtype)
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("bnst,btnd->bsnd", weights, v)


def value_and_gradients(core, given: list[Tensor], *further) -> list[Tensor]:
    *leaves, grad = (x.clone() for x in given)
    for leaf in leaves:
        leaf.requires_grad_()
    q, k, v, sinks = leaves
    out = core(q, k, v, *further, sinks)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("queries", [1, 3, 7])
def test_eager_and_every_gradient(name, queries) -> None:
    given, pattern = tensors(queries), PATTERNS[name]
    found = value_and_gradients(eager_attention(), given, pattern, 0.0)
    wide = [x.double() for x in given]
    expected = value_and_gradients(lambda q, k, v, sinks: by_hand(q, k, v, sinks, pattern), wide)
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[4].double(), expected[4], atol=0.0, rtol=1e-3)  # the smallest one, too


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_flex_computes_what_eager_does(name) -> None:
    """Forward: its backward runs on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, sinks, _ = tensors(7)
    with torch.no_grad():
        out = FlexAttention(flex_attention, create_block_mask)(q, k, v, PATTERNS[name], 0.0, sinks)
    expected = by_hand(q.double(), k.double(), v.double(), sinks.double(), PATTERNS[name])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)


def test_a_query_in_bf16_keeps_its_format() -> None:
    q, k, v, sinks, _ = (x.bfloat16() for x in tensors(7))
    out = eager_attention()(q, k, v, AttentionPattern(), 0.0, sinks)
    assert out.dtype == torch.bfloat16
    expected = by_hand(q.double(), k.double(), v.double(), sinks.double(), AttentionPattern())
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


# -- which backends ------------------------------------------------------------------------------------


def request(device: str) -> AttentionRequest:
    return AttentionRequest(
        device_type=device,
        dtype="bfloat16",
        head_dim=64,
        num_heads=4,
        num_query_groups=2,
        causal=True,
        segments=False,
        bias=False,
        dropout=0.0,
        deterministic=False,
        sinks=True,
    )


def test_backends_that_cannot_say_why(monkeypatch) -> None:
    monkeypatch.setattr(flash, "find_spec", lambda name: SimpleNamespace(origin="somewhere"))
    assert supports_eager(request("cuda")) is True
    assert flex.supports_flex(request("cuda")) is True
    for answer in (
        supports_sdpa(request("cpu")),
        supports_sdpa(request("cuda")),
        cudnn.supports_cudnn(request("cuda")),
    ):
        assert answer == "it does not return the log-sum-exp of its scores, to which a sink adds a term"
    for supports in (flash.supports_flash_2, flash.supports_flash_3):
        assert (
            supports(request("cuda")) == "the log-sum-exp of its scores, to which a sink adds a term, has no gradient"
        )


# -- context parallel ----------------------------------------------------------------------------------


def capped_core(method: str):
    """What a model with a soft cap is given on one of two context-parallel ranks."""
    host = load_plugins()
    overrides = ["train.train_iters=1", f"parallel.cp_comm_type={method}", "data.seq_length=16"]
    config = load_config(preset="gpt-tiny", overrides=overrides, host=host).config
    ctx = ParallelContext(axes={"cp": Axis(2, 0, None, (0, 1))})
    environment = ModelBuildContext(config, ctx, host)
    return environment.attention("eager", num_heads=4, num_query_groups=2, head_dim=16, logit_softcap=30.0)


def test_a_soft_cap_over_blocks_of_keys_is_refused() -> None:
    for method in ("p2p", "all_gather"):
        with pytest.raises(ConfigError, match=f'soft cap .*cp_comm_type={method} computes .*cp_comm_type to "a2a"'):
            capped_core(method)
    assert callable(capped_core("a2a"))
