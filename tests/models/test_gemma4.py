"""Gemma 4 (text) against `transformers`."""

from __future__ import annotations

import pytest
import torch
from tests.models import decoder_reference as ref

from mt_core.nn.layout import parameter_layouts

transformers = pytest.importorskip("transformers")

VOCAB = 109
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 900.0},
}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "global_head_dim": 12,
    "intermediate_size": 44,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "rope_parameters": ROPE,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "final_logit_softcapping": 3.0,
    "attn_implementation": "eager",
    "pad_token_id": None,  # otherwise its token embedding gets no gradient from the input
}
MOE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}
SHARED = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
CASES = {
    "local and global heads": {},
    "keys as values": SHARED,
    "per-layer embeddings": {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCAB + 2},
    # The class computes shared keys and values together with per-layer embeddings alone.
    "as E2B": {
        "hidden_size_per_layer_input": 6,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
    },
    "experts": {**SHARED, **MOE, "final_logit_softcapping": None},
    "scaled, untied": {
        "tie_word_embeddings": False,
        "rope_parameters": {**ROPE, "full_attention": {**ROPE["full_attention"], "factor": 2.0}},
    },
}


def gemma4(**keys) -> torch.nn.Module:
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**SHAPE, **keys}))
    for number, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.75 + 0.125 * number)
    return model


@pytest.fixture
def pair(host, randomize, request):
    return ref.make_pair(host, gemma4(**CASES[request.param]), randomize, "auto")


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_logits_and_gradients_equal_the_reference(pair) -> None:
    ref.assert_same_function(pair, ref.random_tokens(VOCAB, 17))
    ref.assert_maps_round_trip(pair)


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_decoding_equals_the_forward_pass(pair) -> None:
    ref.assert_decoding_equals_forward(pair.ours, ref.random_tokens(VOCAB, 17))


def test_the_scalar_of_a_layer_is_stored_and_not_trained(host, randomize) -> None:
    pair = ref.make_pair(host, gemma4(), randomize)
    layouts = parameter_layouts(pair.ours)
    assert [name for name, layout in layouts.items() if not layout.trained] == [
        f"decoder.layers.{number}.layer_scalar" for number in range(5)
    ]
