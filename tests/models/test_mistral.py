"""Mistral against `transformers`, with sequences longer than its window."""

from __future__ import annotations

import pytest
import torch
from tests.models import decoder_reference as ref

from mt_core.errors import ConfigError

transformers = pytest.importorskip("transformers")

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "attn_implementation": "eager",
}


def mistral(**keys):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**SHAPE, **keys}))


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "keys",
    [
        {"sliding_window": 5},
        {"sliding_window": 1, "tie_word_embeddings": True},
        {"sliding_window": None, "head_dim": 16},
    ],
)
def test_logits_and_gradients_equal_the_reference(host, randomize, backend, keys) -> None:
    pair = ref.make_pair(host, mistral(**keys), randomize, backend)
    ref.assert_same_function(pair, ref.random_tokens(VOCAB, 17))
    ref.assert_decoding_equals_forward(pair.ours, ref.random_tokens(VOCAB, 17))
    ref.assert_maps_round_trip(pair)


def test_a_position_reaches_back_one_window_a_layer(host, randomize) -> None:
    pair = ref.make_pair(host, mistral(sliding_window=3), randomize)
    tokens = ref.random_tokens(VOCAB, 12)
    before = pair.ours(tokens)
    tokens[:, 2] = (tokens[:, 2] + 1) % VOCAB
    changed = (pair.ours(tokens) != before).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [2, 3, 4, 5, 6]  # 2 layers of 2 positions


def test_packed_documents_keep_their_windows(host, randomize) -> None:
    pair = ref.make_pair(host, mistral(sliding_window=4), randomize, "sdpa")
    tokens = ref.random_tokens(VOCAB, 14)
    segments = torch.tensor([[0] * 6 + [1] * 8] * 2)
    restarted = torch.tensor([[*range(6), *range(8)]] * 2)
    packed = pair.ours(tokens, position_ids=restarted, segment_ids=segments)
    alone = torch.cat([pair.ours(tokens[:, :6]), pair.ours(tokens[:, 6:])], dim=1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    shape = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    }
    published = {
        "mistral-7b-v0.1": {**shape, "vocab_size": 32000},
        "mistral-7b-v0.2": {**shape, "vocab_size": 32000},
        "mistral-7b-v0.3": {**shape, "vocab_size": 32768},
    }
    ref.assert_presets_match(host, "mistral", published, transformers.MistralConfig, transformers.MistralForCausalLM)


def test_a_window_is_at_least_one_position(build) -> None:
    with pytest.raises(ConfigError, match="model.sliding_window .*greater than 0"):
        build(family="mistral", num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=50, sliding_window=0)
