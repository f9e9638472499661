"""Muse Glimmer's decoder against `transformers`."""

from __future__ import annotations

import pytest
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError

transformers = pytest.importorskip("transformers")

VOCAB = 89
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 44,
    "sliding_window": 7,
    "final_logit_softcapping": 3.0,
    "output_multiplier": 0.7,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "patch_size": 2}
TOWER |= {"pos_emb_height": 4, "pos_emb_width": 4}
ATTENTION = {"attn_implementation": "eager"}
FULL, SLIDING = "full_attention", "sliding_attention"


def reference_of(**keys) -> nn.Module:
    text = transformers.MuseGlimmerTextConfig(**{**TEXT, **keys})
    config = transformers.MuseGlimmerConfig(
        text_config=text,
        vision_config=transformers.MuseGlimmerVisionConfig(**TOWER),
        projector_hidden_size=16,
        out_hidden_size=64,
        image_token_id=7,
        video_token_id=VOCAB,
        **ATTENTION,
    )
    return transformers.MuseGlimmerForConditionalGeneration(config)


MIXED = {"layer_types": [FULL, SLIDING, FULL, SLIDING, SLIDING, FULL], "layer_rope_theta": [0, 1e4, 1e4, 0, 1e4, 1e4]}


@pytest.mark.parametrize("keys", [{}, MIXED], ids=["each fourth from the last", "listed"])
def test_logits_gradients_and_continuations_equal_the_reference(host, randomize, keys) -> None:
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23))
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_decoder(host) -> None:
    model = dense.without_values(transformers.MuseGlimmerTextModel, transformers.MuseGlimmerTextConfig())
    head = 202048 * 6656
    assert dense.parameter_count(dense.build_preset(host, "muse-glimmer-30b")) == model.num_parameters() + head


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_rope_theta": [0, 5e5, 0, 5e5, 0, 0]}, "layer_rope_theta=.* is not supported"),
        ({"sliding_window": None}, "sliding_window=None is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {"model_type": "muse_glimmer", "text_config": {**TEXT, **fields}}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "muse_glimmer").read_config(external)
