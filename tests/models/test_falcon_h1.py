"""Falcon-H1 against `transformers`."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models.mamba_reference import build, configure, make_pair, segments_of
from torch import nn

from mt_core.errors import ConfigError
from mt_models.falcon_h1.config import flops_per_token
from mt_models.falcon_h1.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

VOCAB = 89
FACTORS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.7,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.5, 0.7, 1.5, 1.25, 0.8],
    "mlp_multipliers": [0.9, 0.6],
}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "intermediate_size": 22,
    "mamba_d_ssm": 54,
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 7,
    "attn_implementation": "eager",
}
CASES = {
    "with factors": FACTORS,
    "without factors, tied, biased, of wide heads": {
        "head_dim": None,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
    },
    "with the norm behind the gate": {**FACTORS, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
}


def reference_of(**keys) -> nn.Module:
    shape = {key: value for key, value in {**SHAPE, **keys}.items() if value is not None}
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**shape))


@pytest.mark.parametrize("name", CASES)
def test_the_function_equals_the_reference(host, randomize, name) -> None:
    pair = make_pair(host, "falcon_h1", reference_of(**CASES[name]), randomize)
    tokens = dense.random_tokens(VOCAB, 23)
    dense.assert_same_function(pair, tokens)
    dense.assert_decoding_equals_forward(pair.ours, tokens)
    dense.assert_maps_round_trip(pair)


def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize) -> None:
    pair = make_pair(host, "falcon_h1", reference_of(**FACTORS), randomize)
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


OURS = {
    "family": "falcon_h1",
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 6,
    "mamba_chunk_size": 8,
    "vocab_size": VOCAB,
}


def test_training_packs_documents_that_do_not_see_one_another(host, randomize) -> None:
    model = build(host, configure(host, **OURS)).eval()
    randomize(model)
    lengths = (1, 9, 2, 7)
    tokens = dense.random_tokens(VOCAB, sum(lengths))
    packed = model(tokens, segment_ids=segments_of(*lengths))
    # Rotary positions are relative: a document begins where its first token is.
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, atol=3e-5, rtol=1e-4)


def test_flops_of_parts(host) -> None:
    flops = flops_per_token(configure(host, **OURS).model, 16)
    assert flops.feed_forward == 2 * 6 * 32 * 24
    assert flops.attention_projections == 2 * 8 * 32 * 32
    # 8 heads of 8: z, x, B and C of 2 groups, dt, and the output
    assert flops.mamba_projections == 2 * 2 * 32 * (2 * 64 + 2 * 12 + 8 + 64)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_attention_heads": 5}, "hidden_size=32 is not divisible by model.num_attention_heads=5"),
        ({"kv_channels": 5}, "kv_channels=5 is odd"),
        ({"num_query_groups": 3}, "num_query_groups=3 does not divide"),
        ({"mamba_num_groups": 3}, "mamba_num_groups=3 does not divide"),
        ({"ssm_multipliers": [1.0]}, "ssm_multipliers"),
    ],
)
def test_impossible_shapes_are_refused(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(host, **{**OURS, **keys})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mamba_rms_norm": True}, "mamba_norm_before_gate=True is not supported with mamba_rms_norm=True"),
        ({"projectors_bias": True}, "mamba_proj_bias=False and projectors_bias=True are not supported"),
        ({"mamba_d_head": 4}, "mamba_n_heads=6 times mamba_d_head=4 is not mamba_d_ssm=54"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0}}, "of type linear"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(change, words) -> None:
    external = {**reference_of().config.to_dict(), **change}
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(external)


MEASURED = {"falcon-h1-0.5b": 0.521, "falcon-h1-1.5b": 1.55, "falcon-h1-1.5b-deep": 1.55, "falcon-h1-3b": 3.15}
MEASURED |= {"falcon-h1-7b": 7.59, "falcon-h1-34b": 33.6}
"""Billions of parameters, as published."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", MEASURED)
def test_presets_have_the_sizes_of_the_published_models(host, preset) -> None:
    model = dense.build_preset(host, preset)
    config = transformers.FalconH1Config(**{**HUGGING_FACE.write_config(model.config), "pad_token_id": None})
    reference = dense.without_values(transformers.FalconH1ForCausalLM, config)
    count = dense.parameter_count(model)
    assert count == reference.num_parameters()
    assert count / 1e9 == pytest.approx(MEASURED[preset], rel=5e-3)
