"""OLMo-Hybrid against `transformers`: functions, gradients, names, its size."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref

from mt_models.hugging_face import load_reference, to_reference

transformers = pytest.importorskip("transformers")

VOCAB = 103
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 44,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 3,
    "pad_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
CASES = {
    "rotary, biases": {"attention_bias": True, "rms_norm_eps": 1e-4},
    "no positions, all groups": {
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        "num_key_value_heads": 6,
        "linear_allow_neg_eigval": False,
        "tie_word_embeddings": True,
    },
}


def reference(**keys):
    return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**{**SHAPE, **keys}))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    # Smaller weights than those of other families, for the reason in test_qwen_next.py.
    pair = ref.make_pair(host, reference(**CASES[case]), partial(randomize, scale=0.1))
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 77))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    assert pair.family.read_config(pair.family.write_config(pair.ours.config)) == pair.family.read_config(
        pair.theirs.config.to_dict()
    )
    written, state = to_reference(pair.ours, pair.family), pair.theirs.state_dict()
    saved = ref.published(pair.theirs, state)
    for number, linear in enumerate(pair.ours.config.linear_layers):
        if not linear:  # see the map
            norm = saved.pop(f"model.layers.{number}.feedforward_layer_norm.weight")
            saved[f"model.layers.{number}.post_attention_layernorm.weight"] = norm
    assert set(saved) - set(written) <= set(pair.family.copies(pair.ours.config))
    for number, linear in enumerate(pair.ours.config.linear_layers):
        if linear:  # transformers saves thirds of the rows, whatever the widths of keys and values
            names = [f"model.layers.{number}.linear_attn.{name}_conv1d.weight" for name in "qkv"]
            assert [len(written[name]) for name in names] == [30, 30, 84]
            assert torch.equal(torch.cat([written.pop(n) for n in names]), torch.cat([saved.pop(n) for n in names]))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in written.items())


def test_tensors_of_the_class_in_memory_are_read_too(host, randomize) -> None:
    model = reference(num_hidden_layers=4)
    pair = ref.make_pair(host, model, randomize)
    again = ref.build_from(host, pair.family.read_config(model.config.to_dict()))
    load_reference(again, model.state_dict(), pair.family)
    ours, expected = to_reference(again, pair.family), to_reference(pair.ours, pair.family)
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    shapes = {"olmo-hybrid-7b": {}}
    kinds = transformers.OlmoHybridConfig, transformers.OlmoHybridForCausalLM
    dense.assert_presets_match(host, "olmo_hybrid", shapes, *kinds)
    assert dense.parameter_count(dense.build_preset(host, "olmo-hybrid-7b")) / 1e9 == pytest.approx(7.4, rel=0.03)
