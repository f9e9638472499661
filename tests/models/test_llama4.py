"""Llama 4 against `transformers`, with sequences of several chunks."""

from __future__ import annotations

import pytest
import torch
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref

transformers = pytest.importorskip("transformers")

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "intermediate_size": 20,
    "intermediate_size_mlp": 28,
    "num_local_experts": 3,
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "no_rope_layer_interval": 3,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
CASES = {"scout": {}, "maverick": {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True}}


def llama4(**keys):
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**{**SHAPE, **keys}))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    pair = ref.make_pair(host, llama4(**CASES[case]), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 18))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 18))
    ref.assert_maps_round_trip(pair)


def test_a_chunk_sees_nothing_of_the_one_before(host, randomize) -> None:
    """But through the layers without chunks, of which this model has none."""
    pair = ref.make_pair(host, llama4(no_rope_layers=[1, 1, 1, 1]), randomize)
    tokens = dense.random_tokens(VOCAB, 12)
    before = pair.ours(tokens)
    tokens[:, 3] = (tokens[:, 3] + 1) % VOCAB
    # Not to the bit: an expert multiplies other rows together.
    changed = ((pair.ours(tokens) - before).abs() > 1e-4).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [3, 4]


def test_packed_documents_keep_their_chunks(host, randomize) -> None:
    pair = ref.make_pair(host, llama4(), randomize, "sdpa")
    tokens = dense.random_tokens(VOCAB, 14)
    segments = torch.tensor([[0] * 6 + [1] * 8] * 2)
    restarted = torch.tensor([[*range(6), *range(8)]] * 2)
    packed = pair.ours(tokens, position_ids=restarted, segment_ids=segments)
    alone = torch.cat([pair.ours(tokens[:, :6]), pair.ours(tokens[:, 6:])], dim=1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    maverick = {"num_local_experts": 128, "interleave_moe_layer_step": 2}
    kinds = (transformers.Llama4TextConfig, transformers.Llama4ForCausalLM)
    shapes = {"llama4-scout": (*kinds, {}), "llama4-maverick": (*kinds, maverick)}
    ref.assert_presets_match(host, "llama4", shapes)
