"""Megatron's T5 against a transformer written out in plain torch, recomputation, bad input."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits
from torch import Tensor

from mt_core.errors import ConfigError

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "decoder_num_layers": 1}
MEGATRON = {
    **SMALL,
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 24,
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "scale_attention_scores": True,
    "scale_output": False,
    "add_output_bias": True,
}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """encoder_tokens [2, 13], decoder_tokens [2, 7], encoder_mask [2, 13]"""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, 8:] = 0
    tokens = torch.randint(0, 50, (2, 20), generator=generator)
    return tokens[:, :13], tokens[:, 13:], mask


def by_hand(state: dict[str, Tensor], source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Logits of Megatron's T5 in fp64, from its equations: 4 heads of 8, pre-norm, eps 1e-6."""
    p = {name: value.double() for name, value in state.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]
        )

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        out = torch.zeros_like(q)  # [B, S, 4, 8]
        for b in range(q.shape[0]):
            for n in range(4):
                scores = q[b, :, n] @ k[b, :, n].T / math.sqrt(8)
                out[b, :, n] = scores.masked_fill(~seen[b], -math.inf).softmax(-1) @ v[b, :, n]
        return out.flatten(2)

    def self_attention(name: str, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = linear(f"{name}.linear_qkv", x).unflatten(-1, (4, 3, 8)).unbind(3)
        return linear(f"{name}.linear_proj", attend(q, k, v, seen))

    def mlp(name: str, x: Tensor) -> Tensor:
        return linear(f"{name}.linear_fc2", F.gelu(linear(f"{name}.linear_fc1", x)))

    words, places = p["embedding.word_embeddings.weight"], p["embedding.position_embeddings.weight"]
    x = words[source] + places[: source.shape[1]]
    visible = mask.bool()[:, None].expand(-1, source.shape[1], -1)
    for i in range(2):
        layer = f"encoder.layers.{i}."
        x = x + self_attention(f"{layer}self_attention", norm(f"{layer}input_layernorm", x), visible)
        x = x + mlp(f"{layer}mlp", norm(f"{layer}pre_mlp_layernorm", x))
    memory = norm("encoder.final_layernorm", x)

    length = target.shape[1]
    y = words[target] + places[:length]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(2, -1, -1)
    layer = "decoder.layers.0."
    y = y + self_attention(f"{layer}self_attention", norm(f"{layer}input_layernorm", y), causal)
    q = linear(f"{layer}cross_attention.linear_q", norm(f"{layer}pre_cross_attn_layernorm", y)).unflatten(-1, (4, 8))
    k, v = linear(f"{layer}cross_attention.linear_kv", memory).unflatten(-1, (4, 2, 8)).unbind(3)
    y = y + linear(f"{layer}cross_attention.linear_proj", attend(q, k, v, mask.bool()[:, None].expand(-1, length, -1)))
    y = y + mlp(f"{layer}mlp", norm(f"{layer}pre_mlp_layernorm", y))
    return norm("decoder.final_layernorm", y) @ words[:50].T + p["output_layer.bias"][:50]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_megatrons_t5_equals_its_equations(build, randomize, backend) -> None:
    model = build(**MEGATRON, attention_backend=backend, family="t5")
    randomize(model)
    source, target, mask = batch()
    expected = by_hand(dict(model.state_dict()), source, target, mask)
    torch.testing.assert_close(model(source, target, mask).double(), expected, atol=1e-4, rtol=1e-4)


def test_names_are_those_of_megatron_core(build) -> None:
    names = {name for name, _ in build(**MEGATRON, family="t5").named_parameters()}
    ends = ("weight", "bias")
    assert {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.bias"} <= names
    for part in ("linear_q", "linear_kv", "linear_proj"):
        assert {f"decoder.layers.0.cross_attention.{part}.{end}" for end in ends} <= names
    assert {f"decoder.layers.0.pre_cross_attn_layernorm.{end}" for end in ends} <= names
    relative = {name for name, _ in build(**SMALL, family="t5").named_parameters()}
    assert {f"{side}_relative_pos_emb.relative_attention_bias.weight" for side in ("encoder", "decoder")} <= relative


@pytest.mark.parametrize("keys", [SMALL, MEGATRON], ids=["relative", "learned"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_recomputation_changes_no_gradient(build, randomize, keys, backend) -> None:
    gradients = []
    for granularity in ("none", "full"):
        off = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attention_backend": backend}
        model = build(f"recompute.recompute_granularity={granularity}", **keys, **off, family="t5").train()
        randomize(model)
        model(*batch()).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-6, rtol=1e-5, msg=name)


def test_learned_positions_go_on_behind_the_cache(build, randomize) -> None:
    model = build(**MEGATRON, family="t5")
    randomize(model)
    source, target, mask = batch()
    texts = [{"encoder_tokens": row[seen.bool()][None]} for row, seen in zip(source, mask, strict=True)]
    decoded = cached_logits(model, target, range(1, 8), texts)
    torch.testing.assert_close(decoded, model(source, target, mask), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_attention_heads": 5}, r"hidden_size=32 is not divisible .*=5; .* 1, 2, 4, 8, 16 or 32, or set"),
        ({"position_embedding_type": "learned_absolute"}, r"max_position_embeddings is not set; .* at least 16"),
        (
            {"position_embedding_type": "learned_absolute", "max_position_embeddings": 8},
            r"data.seq_length=16 is longer than model.max_position_embeddings=8",
        ),
        ({"max_position_embeddings": 32}, r"max_position_embeddings .* would be ignored"),
        ({"relative_attention_num_buckets": 30}, r"=30 is no multiple of 4.*28 or 32"),
        ({"relative_attention_max_distance": 16}, r"max_distance=16 must be above 16"),
        (
            {"untie_embeddings_and_output_weights": True, "add_output_bias": True},
            r"add_output_bias .* would be ignored",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(**SMALL | keys, family="t5")
