"""`mla_up_proj`: queries, keys and values that come from latents are not kept, and every gradient stays the same."""

from __future__ import annotations

import pytest
import torch
from tests.models.moe_reference import settings
from torch import Tensor

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.layout import initialize
from mt_core.nn.recompute import remade
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train import build

LAYERS, BATCH, LENGTH, HEADS = 2, 2, 32, 4
SHAPE = {
    "family": "deepseek",
    "num_layers": LAYERS,
    "hidden_size": 16,
    "num_attention_heads": HEADS,
    "ffn_hidden_size": 24,
    "kv_lora_rank": 10,
    "qk_head_dim": 24,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 20,
    "vocab_size": 263,
}
HEADS_KEPT = LAYERS * BATCH * LENGTH * HEADS * (32 + 32 + 24 + 20) * 4
"""Bytes of queries and keys, and of the rows of which values are a part, in fp32."""


def modules(*names: str) -> tuple[str, str]:
    return "recompute.recompute_granularity=selective", f"recompute.recompute_modules={list(names)}"


def kept_and_gradients(keys: dict[str, object], *chosen: str) -> tuple[int, dict[str, Tensor]]:
    """Bytes kept between forward and backward, each storage once; and the gradients."""
    host, ctx = load_plugins(), ParallelContext()
    further = [f"data.seq_length={LENGTH}", "train.train_iters=1", *chosen]
    config = load_config(overrides=[*settings({**SHAPE, **keys}), *further], host=host).config
    model = build.build_model(config, ctx, host)
    initialize(model, 1, ctx)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens).float().logsumexp(-1).mean()
    held = sum(kept.values())
    loss.backward()
    return held, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("keys", [{}, {"q_lora_rank": 12}], ids=["queries of the hidden state", "queries of a latent"])
def test_heads_are_not_kept_and_every_gradient_is_the_same(keys) -> None:
    plain, expected = kept_and_gradients(keys)
    held, gradients = kept_and_gradients(keys, *modules("mla_up_proj"))
    assert plain - held >= HEADS_KEPT
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


def test_with_core_attention_nothing_but_latents_is_kept_of_it() -> None:
    keys = {"attention_backend": "eager", "attention_dropout": 0.1}
    plain, expected = kept_and_gradients(keys)
    core, _ = kept_and_gradients(keys, *modules("core_attn"))
    both, gradients = kept_and_gradients(keys, *modules("core_attn", "mla_up_proj"))
    assert core < plain
    assert core - both >= HEADS_KEPT
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


def test_results_are_made_once_for_each_backward_pass() -> None:
    made: list[int] = []
    weight = torch.tensor([2.0, 3.0], requires_grad=True)

    def make() -> tuple[Tensor, Tensor]:
        made.append(1)
        return weight * 5, weight * 7

    result = remade(make, lambda a, b: (a * b).sum())  # 35 w^2
    assert len(made) == 1
    for passes in (2, 3):
        (gradient,) = torch.autograd.grad(result, weight, retain_graph=True)
        assert gradient.tolist() == [140.0, 210.0]
        assert len(made) == passes
    with torch.no_grad():
        remade(make, lambda a, b: a + b)
    assert len(made) == 4


def test_a_family_without_latents_refuses_it() -> None:
    with pytest.raises(ConfigError, match="mla_up_proj, the way up from latents; model.family=gpt has none; remove it"):
        load_config(preset="gpt-tiny", overrides=[*modules("mla_up_proj")])
