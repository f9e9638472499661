"""Gemma 2 and 3 against `transformers`."""

from __future__ import annotations

import pytest
import torch
from tests.models import decoder_reference as ref

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError

transformers = pytest.importorskip("transformers")

VOCAB = 109
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "sliding_window": 5,
    "attn_implementation": "eager",
    "pad_token_id": None,  # otherwise its token embedding gets no gradient from the input
}
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
}
CASES = {
    "Gemma 2": ("gemma2", {"query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "Gemma 2, no caps, untied": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "Gemma 3": ("gemma3", {"rope_parameters": ROPE, "sliding_window_pattern": 3, "query_pre_attn_scalar": 40}),
    "Gemma 3, local layers alone": ("gemma3", {"num_hidden_layers": 2}),
}


def gemma(kind: str, **keys):
    if kind == "gemma2":
        return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**SHAPE, **keys}))
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**SHAPE, **keys}))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    kind, keys = CASES[case]
    pair = ref.make_pair(host, gemma(kind, **keys), randomize, "auto")
    ref.assert_same_function(pair, ref.random_tokens(VOCAB, 17))
    ref.assert_decoding_equals_forward(pair.ours, ref.random_tokens(VOCAB, 17))
    ref.assert_maps_round_trip(pair)


def test_gemma_3_runs_on_eager_as_on_sdpa(host, randomize) -> None:
    kind, keys = CASES["Gemma 3"]
    pair = ref.make_pair(host, gemma(kind, **keys), randomize, "eager")
    ref.assert_same_function(pair, ref.random_tokens(VOCAB, 17))


def test_the_embedding_factor_is_rounded_as_in_the_reference(host, randomize) -> None:
    """In bf16 sqrt(32) is 5.65625."""
    pair = ref.make_pair(host, gemma("gemma3"), randomize)
    tokens = ref.random_tokens(VOCAB, 5)
    ours = pair.ours.bfloat16().embedding(tokens, torch.arange(5)[None])
    assert torch.equal(ours, pair.theirs.bfloat16().model.embed_tokens(tokens))


def shape(layers, hidden, heads, groups, head, ffn, vocab):
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "intermediate_size": ffn,
        "vocab_size": vocab,
    }


GEMMA2 = {
    "gemma2-2b": shape(26, 2304, 8, 4, 256, 9216, 256000),
    "gemma2-9b": shape(42, 3584, 16, 8, 256, 14336, 256000),
    "gemma2-27b": shape(46, 4608, 32, 16, 128, 36864, 256000),
}
GEMMA3 = {
    "gemma3-270m": shape(18, 640, 4, 1, 256, 2048, 262144),
    "gemma3-1b": shape(26, 1152, 4, 1, 256, 6912, 262144),
    "gemma3-4b": shape(34, 2560, 8, 4, 256, 10240, 262208),
    "gemma3-12b": shape(48, 3840, 16, 8, 256, 15360, 262208),
    "gemma3-27b": shape(62, 5376, 32, 16, 128, 21504, 262208),
}


@pytest.mark.slow
def test_presets_of_gemma_2_have_the_sizes_of_the_published_models(host) -> None:
    ref.assert_presets_match(host, "gemma", GEMMA2, transformers.Gemma2Config, transformers.Gemma2ForCausalLM)


@pytest.mark.slow
def test_presets_of_gemma_3_have_the_sizes_of_the_published_models(host) -> None:
    ref.assert_presets_match(host, "gemma", GEMMA3, transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM)


def test_neither_presets_nor_imported_configurations_choose_a_backend(host) -> None:
    published = transformers.Gemma2Config(**GEMMA2["gemma2-2b"]).to_dict()
    assert published["attn_logit_softcapping"] == 50.0
    assert "attention_backend" not in ref.family_of(host, "gemma2").read_config(published)
    assert (
        load_config(preset="gemma2-2b", overrides=["train.train_iters=1"], host=host).config.model.attention_backend
        == "auto"
    )


# -- bad input -------------------------------------------------------------------------------------

SMALL = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}


def test_a_backend_without_soft_caps_is_refused(build) -> None:
    with pytest.raises(ConfigError, match="attention_backend=sdpa cannot serve.*no soft cap on the scores; use eager"):
        build(family="gemma", **SMALL, attn_logit_softcapping=50.0, attention_backend="sdpa")


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (
            "gemma2",
            {"layer_types": ["full_attention"] * 3 + ["other"]},
            "layer_types=.* full_attention or sliding_attention",
        ),
        (
            "gemma2",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling of type linear is not supported in a gemma2",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation='silu' .* it can be 'gelu_pytorch_tanh'"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type of sliding_attention can only be default",
        ),
        ("gemma3_text", {"vision_config": {}}, "fields that are not known: vision_config"),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_read(host, kind, fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, kind).read_config({"model_type": kind, **SHAPE, **fields})


def test_what_gemma_2_cannot_express_is_named(host, build) -> None:
    model = build(family="gemma", **SMALL, qk_layernorm=False)
    with pytest.raises(ConfigError, match="rotary_base_local=10000.0 cannot be written as a Hugging Face gemma2"):
        ref.family_of(host, "gemma2").write_config(model.config)
