"""Jamba against `transformers`, and its scan in chunks against one position after another."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError
from mt_models.blocks.selective_scan import selective_scan
from mt_models.jamba.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

VOCAB = 89
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 22,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_dt_rank": 7,
    "pad_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


def reference_of(**keys) -> nn.Module:
    return transformers.JambaForCausalLM(transformers.JambaConfig(**{**SHAPE, **keys}))


@pytest.mark.parametrize(
    "keys", [{}, {"num_experts": 1, "mamba_dt_rank": "auto", "mamba_proj_bias": True, "tie_word_embeddings": True}]
)
def test_logits_and_gradients_equal_the_reference(host, randomize, keys) -> None:
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    # Longer than a chunk of the scan.
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 37))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


@pytest.mark.parametrize("with_documents", [False, True])
def test_chunks_compute_what_the_recurrence_does(with_documents) -> None:
    generator = torch.Generator().manual_seed(0)
    x, b, c = (torch.randn(2, 13, size, generator=generator) for size in (3, 4, 4))
    dt, a = torch.rand(2, 13, 3, generator=generator), -3 * torch.rand(3, 4, generator=generator)
    state = torch.randn(2, 3, 4, generator=generator)
    segments = torch.tensor([[0] * 3 + [1] * 2 + [0] * 8, [0] * 5 + [4] * 8]) if with_documents else None
    expected, current = [], state
    for place in range(13):
        if segments is not None and place:
            same = segments[:, place] == segments[:, place - 1]
            current = current * same[:, None, None]
        current = current * (dt[:, place, :, None] * a).exp()
        current = current + (dt[:, place] * x[:, place])[..., None] * b[:, place, None]
        expected.append((current * c[:, place, None]).sum(-1))
    y, last = selective_scan(x, dt, a, b, c, state=state, segment_ids=segments, chunk_size=5)
    torch.testing.assert_close(y, torch.stack(expected, 1))
    torch.testing.assert_close(last, current)


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    large = {"hidden_size": 8192, "num_hidden_layers": 72, "num_attention_heads": 64, "intermediate_size": 24576}
    classes = transformers.JambaConfig, transformers.JambaForCausalLM
    ref.assert_presets_match(host, "jamba", {"jamba-mini": (*classes, {}), "jamba-large": (*classes, large)})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attn_layer_offset": 3}, "attn_layer_offset=3 has to be below model.attn_layer_period=3"),
        ({"rotary_base": 5.0}, "rotary_base=5.0 would be ignored: this family has no positions"),
    ],
)
def test_impossible_shapes_are_refused(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ref.build_from(host, {**HUGGING_FACE.read_config(reference_of().config.to_dict()), **keys})


def test_experts_in_another_order_are_not_written(host) -> None:
    config = ref.build_from(host, HUGGING_FACE.read_config(reference_of().config.to_dict())).config
    moe = config.model_copy(update={"moe": {**config.moe, "moe_layer_freq": "[0,1,1,0]"}})
    with pytest.raises(ConfigError, match=r"experts in layers \[1, 2\] cannot be written as a Hugging Face jamba"):
        HUGGING_FACE.write_config(moe)
