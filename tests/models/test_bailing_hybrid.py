"""Ling 3.0 against `transformers`, and the limits of its activations, which transformers leaves out, by the formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from tests.models.prediction_reference import LENGTH, assert_same_prediction, causal, one_by_one
from torch import nn

from mt_core.errors import ConfigError
from mt_models.bailing_hybrid.flops import flops_per_token
from mt_models.hugging_face import load_reference, to_reference

transformers = pytest.importorskip("transformers")

VOCAB = 89
FULL, LINEAR = "full_attention", "linear_attention"
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "num_expert_group": 3,
    "topk_group": 2,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "head_dim": 5,
    "short_conv_kernel_size": 3,
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
    "num_nextn_predict_layers": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
NO_GRADIENT = ("router.expert_bias",)


def reference_of(**keys) -> nn.Module:
    model = transformers.BailingHybridForCausalLM(transformers.BailingHybridConfig(**{**SHAPE, **keys}))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    "keys", [{}, {"kda_safe_gate": False, "num_expert_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}]
)
def test_logits_and_gradients_equal_the_reference(host, randomize, keys) -> None:
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), NO_GRADIENT)
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


def test_published_names_are_written(host, randomize) -> None:
    """Those of the code beside the files: transformers writes the output of every layer under one name."""
    pair = ref.make_pair(host, reference_of(), randomize)
    state = to_reference(pair.ours, pair.family)
    outputs = [name for name in state if name.endswith((".dense.weight", ".attention.o_proj.weight"))]
    kinds = ["o_proj", "dense", "o_proj", "dense"]
    assert sorted(outputs) == [f"model.layers.{layer}.attention.{kind}.weight" for layer, kind in enumerate(kinds)]
    assert {"num_experts_per_tok", "norm_topk_prob", "n_group"} <= set(pair.family.write_config(pair.ours.config))
    older = {name: x.reshape(1, 1, -1, 1) if name.endswith("A_log") else x for name, x in state.items()}
    load_reference(pair.ours, {**older, "model.layers.4.eh_proj.weight": torch.ones(1)}, pair.family)
    assert all(torch.equal(x, state[name]) for name, x in to_reference(pair.ours, pair.family).items())


def test_activations_of_late_layers_are_limited(host, randomize) -> None:
    """Experts and shared experts of a layer have limits of their own; without them the function is another one."""
    pair = ref.make_pair(host, reference_of(), randomize)
    external = pair.theirs.config.to_dict()
    lists = {"expert_swiglu_limit_list": [0, 0, 0.02, 0], "share_expert_swiglu_limit_list": [0, None, 0.03, 0.01]}
    keys = pair.family.read_config({**external, **lists})
    assert keys["expert_swiglu_limits"] == [0.0, 0.0, 0.02, 0.0]
    limited = ref.build_from(host, keys)
    limited.load_state_dict(pair.ours.state_dict())
    written = pair.family.write_config(limited.config)
    assert written["share_expert_swiglu_limit_list"] == [0.0, 0.0, 0.03, 0.01]

    def capped(limit: float):
        return lambda gate, up: F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    def feed_forward(mlp: nn.Module, act):
        return lambda x: mlp.down_proj(act(mlp.gate_proj(x), mlp.up_proj(x)))

    def experts(module: nn.Module, act):
        def forward(x, chosen, weights):
            every = [
                F.linear(act(*F.linear(x, up).chunk(2, -1)), down)
                for up, down in zip(module.gate_up_proj, module.down_proj, strict=True)
            ]
            picked = torch.stack(every, 1).gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
            return (picked * weights[..., None]).sum(1)

        return forward

    layers = pair.theirs.model.layers
    layers[2].mlp.experts.forward = experts(layers[2].mlp.experts, capped(0.02))
    layers[2].mlp.shared_experts.forward = feed_forward(layers[2].mlp.shared_experts, capped(0.03))
    layers[3].mlp.shared_experts.forward = feed_forward(layers[3].mlp.shared_experts, capped(0.01))
    tokens = dense.random_tokens(VOCAB, 17)
    expected = pair.theirs(tokens).logits
    dense.assert_near(limited(tokens), expected)
    assert (pair.ours(tokens) - expected).abs().max() > 1e-3 * expected.abs().max()


PREDICTION = {"post_norm": "final_layernorm", "attention.o_proj": "attention.dense"}


def published_prediction(state):
    """Under the names of published files, where the layer follows the others."""
    found = {}
    for name, tensor in state.items():
        name = name.removeprefix("mtp_block.").replace("self_attn.", "attention.")
        for theirs, published in PREDICTION.items():
            name = name.replace(theirs, published)
        name = name.replace("gate.e_score_correction_bias", "gate.expert_bias")
        found |= {f"model.layers.4.{one}": part for one, part in one_by_one(name, tensor).items()}
    return found


def test_prediction_equals_the_reference(host, randomize) -> None:
    """The layer is of latent attention and experts, whatever the last layer of the decoder is."""
    from transformers.modeling_layers import MtpLayer

    theirs = reference_of(layer_types=[LINEAR, FULL, FULL, LINEAR])
    decoder = theirs.model.layers[2]
    layer = MtpLayer(theirs.config, type(decoder), type(decoder.input_layernorm), 2)
    randomize(theirs)
    randomize(layer, seed=1)
    places = torch.arange(LENGTH)[None]
    rotary = theirs.model.rotary_emb(torch.zeros(1), places)
    model = assert_same_prediction(
        host,
        theirs,
        layer,
        published_prediction,
        lambda embedded, hidden: layer(embedded, hidden, rotary, causal(), places, None),
        NO_GRADIENT,
        num_nextn_predict_layers=1,
    )
    assert model.config.with_predicted_layers().linear_layers[-1] is False


OURS = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "kv_lora_rank": 10,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 8,
    "linear_attention_freq": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 6,
    "vocab_size": 384,
}


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    classes = (transformers.BailingHybridConfig, transformers.BailingHybridForCausalLM)
    flash = without_prediction = {"num_nextn_predict_layers": 0}
    tiny = {
        **without_prediction,
        "num_hidden_layers": 24,
        "hidden_size": 1536,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 4608,
        "moe_intermediate_size": 512,
        "num_experts": 128,
        "first_k_dense_replace": 1,
        "layer_group_size": 4,
    }
    # The class has no latent of queries, which the tiny model has: compared without it.
    shapes = {"ling-3.0-flash": (*classes, flash), "ling-3.0-tiny": (*classes, tiny)}
    ref.assert_presets_match(host, "bailing_hybrid", shapes, "model.q_lora_rank=null", "model.mtp_num_layers=0")


def test_flops_of_parts(build) -> None:
    """A matrix of each gate: decays and outputs of Kimi delta attention, the heads of latent attention."""
    config = build(family="bailing_hybrid", **OURS).config
    one, none = (flops_per_token(config.model_copy(update={"linear_attention_freq": n}), 16) for n in (3, 1))
    assert none.linear_projections == none.linear_rule == 0
    assert none.attention_projections == pytest.approx(3 * one.attention_projections)
    assert one.linear_projections == 2 * 2 * 32 * (6 * 12 + 2)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"expert_swiglu_limits": [1.0]}, "expert_swiglu_limits has 1 values; it needs one for each"),
        ({"expert_swiglu_limits": [0.0, 1.0, 0.0]}, r"expert_swiglu_limits limits layers \[1\], which have no experts"),
    ],
)
def test_impossible_shapes_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="bailing_hybrid", **{**OURS, **keys})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is not supported"),
        ({"moe_renormalize": False}, r"norm_topk_prob \(or moe_renormalize\)=False is not supported"),
        ({"layer_types": None, "layer_group_size": 3}, "layer_group_size=3 does not divide num_hidden_layers=4"),
        ({"rotary_dim": 4}, "rotary_dim=4 is not supported"),
        ({"no_kda_lora": False}, "no_kda_lora=False is not supported"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "granularity_type='element_wise' is not supported"),
        ({"moe_shared_expert_intermediate_size": 5}, "moe_shared_expert_intermediate_size=5 is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "bailing_hybrid").read_config({"model_type": "bailing_hybrid", **external, **fields})
