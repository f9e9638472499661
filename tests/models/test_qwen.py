"""Qwen 2 and 3 against `transformers`."""

from __future__ import annotations

import pytest
from tests.models import decoder_reference as ref

from mt_core.errors import ConfigError

transformers = pytest.importorskip("transformers")

VOCAB = 103
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen2 with windows in the last layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "Qwen2.5 with YaRN": ("Qwen2", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "Qwen3, wide heads": ("Qwen3", {"head_dim": 16}),
    "Qwen3, tied, with windows": (
        "Qwen3",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 0,
        },
    ),
}


def qwen(kind: str, **keys):
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **keys})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, backend, case) -> None:
    kind, keys = CASES[case]
    pair = ref.make_pair(host, qwen(kind, **keys), randomize, backend)
    ref.assert_same_function(pair, ref.random_tokens(VOCAB, 19))
    ref.assert_decoding_equals_forward(pair.ours, ref.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def shape(layers, hidden, heads, groups, ffn, vocab, tied, **keys):
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **keys,
    }


QWEN2 = {
    "qwen2-0.5b": shape(24, 896, 14, 2, 4864, 151936, True),
    "qwen2-1.5b": shape(28, 1536, 12, 2, 8960, 151936, True),
    "qwen2-7b": shape(28, 3584, 28, 4, 18944, 152064, False),
    "qwen2-72b": shape(80, 8192, 64, 8, 29568, 152064, False),
    "qwen2.5-0.5b": shape(24, 896, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": shape(28, 1536, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": shape(36, 2048, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": shape(28, 3584, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": shape(48, 5120, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": shape(64, 5120, 40, 8, 27648, 152064, False),
    "qwen2.5-72b": shape(80, 8192, 64, 8, 29568, 152064, False),
}
QWEN3 = {
    "qwen3-0.6b": shape(28, 1024, 16, 8, 3072, 151936, True, head_dim=128),
    "qwen3-1.7b": shape(28, 2048, 16, 8, 6144, 151936, True, head_dim=128),
    "qwen3-4b": shape(36, 2560, 32, 8, 9728, 151936, True, head_dim=128),
    "qwen3-8b": shape(36, 4096, 32, 8, 12288, 151936, False, head_dim=128),
    "qwen3-14b": shape(40, 5120, 40, 8, 17408, 151936, False, head_dim=128),
    "qwen3-32b": shape(64, 5120, 64, 8, 25600, 151936, False, head_dim=128),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "published"), [("Qwen2", QWEN2), ("Qwen3", QWEN3)])
def test_presets_have_the_sizes_of_the_published_models(host, kind, published) -> None:
    config, model = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM")
    ref.assert_presets_match(host, "qwen", published, config, model)


# -- bad input -------------------------------------------------------------------------------------

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_window_layers": 1}, "max_window_layers=1 would be ignored.*model.sliding_window is set"),
        ({"sliding_window": 4, "max_window_layers": 3}, "max_window_layers=3 is above model.num_layers=2"),
    ],
)
def test_impossible_windows_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="qwen", **SMALL, **keys)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, r"layer_types=.* is not supported.*has to be \['full_attention'"),
        ({"attention_bias": True}, "attention_bias=True is not supported; it can be False"),
        ({"num_experts": 8}, "fields that are not known: num_experts=8"),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_read(host, fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "qwen3").read_config({"model_type": "qwen3", **SHAPE, **fields})


def test_an_moe_model_of_both_generations_has_no_hugging_face_form(host, build) -> None:
    model = build(family="qwen", **SMALL, add_qkv_bias=True)
    with pytest.raises(ConfigError, match="add_qkv_bias=True with model.qk_layernorm=True cannot be written"):
        ref.family_of(host, "qwen2").write_config(model.config)
