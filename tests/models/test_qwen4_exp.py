"""Qwen4-Exp's decoder against `transformers`."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

transformers = pytest.importorskip("transformers")

VOCAB = 89
END = 3
FULL, LINEAR = "full_attention", "linear_attention"
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "moe_intermediate_size": 14,
    "shared_expert_intermediate_size": 10,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
    "hc_count": 3,
    "hc_lowrank": 10,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24,
    "ple_conv_kernel_size": 3,
    "ngram_size": 4,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 30,
    "make_ngram_vocab_size_divisible_by": 7,
    "split_ngram_parts": 4,
    "indexer_n_heads": 11,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 6,
    "indexer_compress_ratio": 3,
    "output_gate_type": "sigmoid",
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
NO_GRADIENT = ("linear_qk.weight", "indexer.q_layernorm.weight", "indexer.k_layernorm.weight")


def reference_of(**keys) -> nn.Module:
    return transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**{**SHAPE, **keys}))


def tokens_with_ends(length: int, batch: int = 2) -> torch.Tensor:
    tokens = dense.random_tokens(VOCAB, length, batch=batch)
    tokens[0, 5] = tokens[0, 11] = END
    return tokens


def test_logits_gradients_and_continuations_equal_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    ref.assert_same_function(pair, tokens_with_ends(23), NO_GRADIENT)
    ref.assert_maps_round_trip(pair)
    prompt = tokens_with_ends(14, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [5, 14, *range(15, 27)])
    assert logits[0, 13:-1].argmax(-1).tolist() == theirs[0, 14:].tolist()
