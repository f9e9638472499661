"""Mixtral against `transformers`."""

from __future__ import annotations

import pytest
import torch
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref

from mt_core.errors import CheckpointError, ConfigError
from mt_models.flops import flops_per_token, inactive_parameters, moe_flops
from mt_models.hugging_face import load_reference

transformers = pytest.importorskip("transformers")

VOCAB = 101
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_local_experts": 4,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
CASES = {
    "top 2": {},
    "top 3, wide heads, tied": {"num_experts_per_tok": 3, "head_dim": 12, "tie_word_embeddings": True},
    "top 2 in a window": {"sliding_window": 5},
}


def mixtral(**keys):
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SHAPE, **keys}))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    pair = ref.make_pair(host, mixtral(**CASES[case]), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 19))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_balance_loss_and_its_gradient_equal_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, mixtral(num_hidden_layers=1, router_aux_loss_coef=0.03), randomize)
    assert pair.ours.config.moe["moe_aux_loss_coeff"] == [0.03]
    ref.assert_same_balance(pair, dense.random_tokens(VOCAB, 11), pair.theirs.model.layers[0].mlp.gate)


def test_a_saved_checkpoint_is_read_and_every_expert_counted(host, randomize, tmp_path) -> None:
    """Files as transformers writes them: three tensors for each expert of each layer."""
    reference = mixtral()
    randomize(reference)
    reference.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    assert ref.expert_tensors(tensors) == 3 * SHAPE["num_local_experts"] * SHAPE["num_hidden_layers"]
    family = ref.family_of(host, "mixtral")
    model = ref.build_from(host, family.read_config(reference.config.to_dict())).eval()
    load_reference(model, tensors, family)
    tokens = dense.random_tokens(VOCAB, 9)
    dense.assert_near(model(tokens), reference.eval()(tokens).logits)


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    def shape(layers, hidden, heads, ffn, vocab):
        fields = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "intermediate_size": ffn,
            "vocab_size": vocab,
        }
        return transformers.MixtralConfig, transformers.MixtralForCausalLM, fields

    shapes = {
        "mixtral-8x7b": shape(32, 4096, 32, 14336, 32000),
        "mixtral-8x22b": shape(56, 6144, 48, 16384, 32768),
    }
    ref.assert_presets_match(host, "mixtral", shapes)


def test_active_parameters_are_those_that_the_paper_gives(host) -> None:
    """47 B, of which a token uses 13 B (Jiang et al., 2024, section 2)."""
    model = dense.build_preset(host, "mixtral-8x7b")
    total = dense.parameter_count(model)
    assert round(total / 1e9) == 47
    assert round((total - inactive_parameters(model.config)) / 1e9) == 13


def test_flops_are_those_of_the_chosen_experts(build) -> None:
    config = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 384}
    moe = ref.settings({"moe": {"num_experts": 8, "moe_router_topk": 2, "moe_layer_freq": "([0]*1+[1]*2)"}})
    model = build(*moe, family="mixtral", **config, attention_backend="eager")
    flops = flops_per_token(model.config, 16, convention="full", feed_forward=moe_flops(model.config))
    ref.assert_active_flops(model, flops, {"feed_forward": (".mlp",)})


# -- bad input -------------------------------------------------------------------------------------

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}


def test_an_moe_model_without_its_number_of_experts_is_refused(build) -> None:
    with pytest.raises(ConfigError, match="moe"):
        build(family="mixtral", **SMALL)


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        ({"moe_router_pre_softmax": True}, "moe_router_pre_softmax=True cannot be written as a Hugging Face mixtral"),
        ({"moe_layer_freq": "([0]*1+[1]*1)"}, r"moe_layer_freq=\(\[0\]\*1\+\[1\]\*1\) cannot be written"),
        ({"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size=8 cannot be written"),
        (
            {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.1]},
            r"moe_aux_loss_coeff=\[0.1\] has 1 values, and .*=\['none'\] has 0 losses; give one value for each loss",
        ),
    ],
)
def test_a_router_that_the_format_has_no_word_for_is_refused(host, build, moe, words) -> None:
    model = build(*ref.settings({"moe": {"num_experts": 4}}), family="mixtral", **SMALL)
    config = model.config.model_copy(update={"moe": {"num_experts": 4, **moe}})
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "mixtral").write_config(config)


def test_a_checkpoint_that_lacks_or_adds_an_expert_is_refused(host, randomize) -> None:
    pair = ref.make_pair(host, mixtral(), randomize)
    tensors = ref.published(pair.theirs, pair.theirs.state_dict())
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    lacking = {key: value for key, value in tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_reference(pair.ours, lacking, pair.family)
    added = name.replace("experts.3", "experts.4")
    with pytest.raises(CheckpointError, match=f"{added} is in the checkpoint but unknown"):
        load_reference(pair.ours, {**tensors, added: torch.zeros(1)}, pair.family)
