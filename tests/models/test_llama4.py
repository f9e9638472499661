"""Llama 4 against `transformers`, with sequences of several chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mt_core.nn.attention import AttentionPattern
from mt_import.readers.megatron import import_words

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


@pytest.mark.parametrize("case", CASES)
def test_without_chunks_it_is_one_of_a_chunk_for_all_positions(host, randomize, case) -> None:
    """As Megatron's scripts have it: neither chunks nor queries that grow."""
    keys = {**CASES[case], "attn_temperature_tuning": False, "attention_chunk_size": 64, "max_position_embeddings": 64}
    pair = ref.make_pair(host, llama4(**keys), randomize)
    section = {**pair.family.read_config(pair.theirs.config.to_dict()), "attention_chunk_size": None}
    whole = ref.build_from(host, section).eval()
    whole.load_state_dict(pair.ours.state_dict())
    ref.assert_same_function(dense.Pair(whole, pair.theirs, pair.family), tokens := dense.random_tokens(VOCAB, 18))
    dense.assert_decoding_equals_forward(whole, tokens)
    written = pair.family.write_config(whole.config)
    assert written["attention_chunk_size"] == 64


def megatrons_heads(x: Tensor, frequencies: Tensor, eps: float) -> Tensor:
    """Queries or keys [batch, sequence, heads, size] as Megatron has them: normalized, then each pair of neighbours
    turned."""
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(turned).flatten(-2)


def test_the_layer_is_megatrons_formula(host, randomize) -> None:
    """With norms before the rotation, which turns pairs and so keeps their length, and the constants of
    --use-rope-scaling."""
    groups, heads, size, hidden = 3, 6, 10, 36
    section = llama4_section(host, {"use_rope_scaling": True, "qk_l2_norm": True})
    model = ref.build_from(host, {**section, "vocab_size": VOCAB}).eval()
    randomize(model)
    attention = model.decoder.layers["0"].self_attention
    x = torch.randn(2, 7, hidden, generator=torch.Generator().manual_seed(0))
    rows = (x @ attention.linear_qkv.weight.T).unflatten(-1, (groups, heads // groups + 2, size))
    queries, keys, values = rows.split((heads // groups, 1, 1), dim=-2)
    frequencies = scaled_frequencies(500000.0 ** (-torch.arange(0, size, 2) / size), factor=8.0)
    turned = [megatrons_heads(part.flatten(2, 3), frequencies, 1e-5) for part in (queries, keys)]
    keys, values = (part.repeat_interleave(heads // groups, dim=2) for part in (turned[1], values.flatten(2, 3)))
    q, k, v = (part.transpose(1, 2) for part in (turned[0], keys, values))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    ours = attention(x, AttentionPattern(), model.angles(torch.arange(7)[None], None), None)
    torch.testing.assert_close(ours, expected @ attention.linear_proj.weight.T, atol=2e-6, rtol=1e-5)


def llama4_section(host, arguments) -> dict[str, Any]:
    """[model] of arguments that Megatron's script for Llama 4 has, and these."""
    words = "--num-layers 2 --hidden-size 36 --num-attention-heads 6 --group-query-attention --num-query-groups 3 "
    words += "--kv-channels 10 --ffn-hidden-size 28 --max-position-embeddings 64 --seq-length 64 --micro-batch-size 1 "
    words += "--train-iters 2 --lr 1e-3 --normalization RMSNorm --swiglu --disable-bias-linear --rotary-interleaved "
    words += "--position-embedding-type rope --rotary-base 500000 --hidden-dropout 0 --attention-dropout 0 "
    words += "--untie-embeddings-and-output-weights --num-experts 3 --moe-router-topk 1 --moe-ffn-hidden-size 20 "
    words += "--moe-router-score-function sigmoid --moe-apply-probs-on-input --mock-data "
    words += "--tokenizer-type NullTokenizer --vocab-size 97"
    options = [f"--{name.replace('_', '-')}" for name in arguments]
    return import_words([*words.split(), *options], host).sections["model"]


def scaled_frequencies(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3.1's: divided below one turn over 8192 positions, as they are above four, and in between."""
    turns = 8192 * frequencies / (2 * torch.pi)
    share = ((turns - 1) / 3).clamp(0, 1)
    return frequencies * (share + (1 - share) / factor)


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
