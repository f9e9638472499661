"""Muse Spark's decoder against `transformers`."""

from __future__ import annotations

import pytest
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError
from mt_models.muse_glimmer.flops import flops_per_token

transformers = pytest.importorskip("transformers")

VOCAB = 89
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 44,
    "sliding_window": 7,
    "final_logit_softcapping": 3.0,
    "output_multiplier": 0.7,
    # Norms and sharp scores make rounding errors of one layer larger in the next.
    "qk_scale_factor": 1.7,
    "residual_gate_temperature": 0.5,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 14,
    "moe_hidden_size": 20,
    "routed_scaling_factor": 1.5,
    "experts_implementation": "eager",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
IMAGES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "patch_size": 2}
IMAGES |= {"pos_emb_height": 4, "pos_emb_width": 4}
SOUNDS = {"patch_sizes": [2], "hidden_sizes": [4], "depths": [1], "num_hidden_layers": 1}
FULL, SLIDING = "full_attention", "sliding_attention"


def reference_of(**keys) -> nn.Module:
    text = {**TEXT, **keys}
    config = transformers.MuseSparkConfig(
        text_config=transformers.MuseSparkTextConfig(**text),
        vision_config=transformers.MuseSparkVisionConfig(**IMAGES),
        audio_config=transformers.MuseSparkAudioConfig(**SOUNDS, out_hidden_size=text["hidden_size"]),
        projector_hidden_size=16,
        out_hidden_size=64,
        image_token_id=VOCAB,
        video_token_id=VOCAB,
        audio_token_id=7,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = transformers.MuseSparkForConditionalGeneration(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3)
    return model


MIXED = {
    "layer_types": [FULL, SLIDING, FULL, SLIDING],
    "layer_rope_theta": [0, 1e4, 1e4, 0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
}


@pytest.mark.parametrize("keys", [{}, MIXED], ids=["as published", "listed"])
def test_logits_gradients_and_continuations_equal_the_reference(host, randomize, keys) -> None:
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), ("expert_bias",))
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_decoder(host) -> None:
    model = dense.without_values(transformers.MuseSparkTextModel, transformers.MuseSparkTextConfig())
    head, biases = 202048 * 8192, 62 * 256
    ours = dense.parameter_count(dense.build_preset(host, "muse-spark-816b-a42b"))
    assert ours == model.num_parameters() + head + biases


OURS = {
    "family": "muse_spark",
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "vocab_size": 128,
    "moe": {
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_ffn_hidden_size": 12,
        "moe_latent_size": 20,
    },
}


def test_the_flops_are_those_that_torch_counts(build) -> None:
    plain = {key: value for key, value in OURS.items() if key != "moe"}
    model = build(*ref.settings({"moe": OURS["moe"]}), **plain, attention_backend="eager")
    flops = flops_per_token(model.config, 16, convention="full")
    projections = (".linear_qkv", ".linear_proj")
    ref.assert_active_flops(model, flops, {"attention_projections": projections, "feed_forward": (".mlp",)})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"moe_latent_size": None}, "moe_latent_size is not set"),
        ({"moe_apply_probs_on_input": True, "moe_router_topk": 1}, "moe_apply_probs_on_input=true is not possible"),
    ],
)
def test_experts_that_the_model_cannot_have(host, keys, words) -> None:
    moe = {key: value for key, value in {**OURS["moe"], **keys}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        ref.build_from(host, {**OURS, "moe": moe})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_rope_theta": [0, 5e5, 0, 1e4]}, "layer_rope_theta=.* is not supported"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types=.* is not supported"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        ({"rope_theta": 1e4}, "rope_theta=10000.0 without rope_parameters is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {"model_type": "muse_spark", "text_config": {**TEXT, **fields}}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "muse_spark").read_config(external)
