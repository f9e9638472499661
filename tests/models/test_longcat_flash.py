"""LongCat-Flash against `transformers`: logits, gradients, cached decoding, files; and what is refused."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from tests.models.prediction_reference import LENGTH, assert_same_prediction, causal
from torch import nn

from mt_core.errors import ConfigError
from mt_models.hugging_face import load_reference
from mt_models.longcat_flash.config import flops_per_token
from mt_models.longcat_flash.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

VOCAB = 89
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_layers": 2,
    "num_attention_heads": 3,
    "ffn_hidden_size": 40,
    "expert_ffn_hidden_size": 12,
    "n_routed_experts": 5,
    "zero_expert_num": 3,
    "moe_topk": 4,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 9,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
YARN = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
CASES = {
    "as published": {},
    "without experts that return the token": {"zero_expert_num": 0, "moe_topk": 2, "rms_norm_eps": 1e-6},
    "YaRN, tied": {"rope_parameters": YARN, "tie_word_embeddings": True, "routed_scaling_factor": 1.0},
}


def reference_of(**keys) -> nn.Module:
    model = transformers.LongcatFlashForCausalLM(transformers.LongcatFlashConfig(**{**SHAPE, **keys}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def make_pair(host, randomize, **keys):
    """The matrices of experts that return the token are zeros, as they are written: nothing reads them."""
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    with torch.no_grad():
        for layer in pair.theirs.model.layers:
            layer.mlp.experts.gate_up_proj[pair.theirs.config.n_routed_experts :] = 0.0
    return pair


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    pair = make_pair(host, randomize, **CASES[case])
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), ("router.expert_bias",))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize) -> None:
    pair = make_pair(host, randomize)
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


@pytest.mark.parametrize("form", ["published", "one tensor"])
def test_experts_are_read_in_every_form(host, randomize, form) -> None:
    """Published files have no matrices for experts that return the token; modules of transformers have one tensor."""
    pair = make_pair(host, randomize)
    tensors = pair.theirs.state_dict()
    if form == "published":
        names = [f".experts.{number}." for number in (5, 6, 7)]
        all_of_them = ref.published(pair.theirs, tensors)
        tensors = {name: x for name, x in all_of_them.items() if not any(one in name for one in names)}
        assert len(tensors) == len(all_of_them) - 2 * 3 * 2
    tensors["model.mtp.layers.0.eh_proj.weight"] = torch.zeros(3)
    model = ref.build_from(host, HUGGING_FACE.read_config(pair.theirs.config.to_dict())).eval()
    load_reference(model, tensors, HUGGING_FACE)
    for own, other in zip(model.parameters(), pair.ours.parameters(), strict=True):
        assert torch.equal(own, other)


class Prediction(nn.Module):
    """The layer of published files: one attention and one feed-forward of transformers."""

    def __init__(self, decoder: nn.Module, config) -> None:
        super().__init__()
        norm = type(decoder.input_layernorm[0])
        self.enorm, self.hnorm, self.input_layernorm, self.post_attention_layernorm, self.norm = (
            norm(config.hidden_size, config.rms_norm_eps) for _ in range(5)
        )
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn, self.mlp = type(decoder.self_attn[0])(config, 0), type(decoder.mlps[0])(config)

    def forward(self, embedded, hidden, rotary):
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        attended = self.self_attn(self.input_layernorm(x), position_embeddings=rotary, attention_mask=causal())[0]
        x = x + attended
        return self.norm(x + self.mlp(self.post_attention_layernorm(x)))


RENAMED = {"enorm": "enorm.m", "hnorm": "hnorm.m", "mlp": "transformer_layer.mlp"}


def published_prediction(state):
    found = {}
    for name, tensor in state.items():
        part, rest = name.split(".", 1)
        inside = f"model.mtp.layers.0.{RENAMED.get(part, part)}.{rest}"
        found["model.mtp.norm.weight" if part == "norm" else inside] = tensor
    return found


def test_prediction_has_one_attention_and_no_experts(host, randomize) -> None:
    theirs = reference_of()
    layer = Prediction(theirs.model.layers[0], theirs.config)
    randomize(theirs)
    randomize(layer, seed=1)
    with torch.no_grad():
        for block in theirs.model.layers:
            block.mlp.experts.gate_up_proj[theirs.config.n_routed_experts :] = 0.0
    rotary = theirs.model.rotary_emb(torch.zeros(1), torch.arange(LENGTH)[None])
    assert_same_prediction(
        host,
        theirs,
        layer,
        published_prediction,
        lambda embedded, hidden: layer(embedded, hidden, rotary),
        ("router.expert_bias",),
    )


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    ours = dense.parameter_count(dense.build_preset(host, "longcat-flash-560b", "model.mtp_num_layers=0"))
    theirs = dense.without_values(transformers.LongcatFlashForCausalLM, transformers.LongcatFlashConfig())
    unread = 28 * 256 * 2 * 2048 * 6144
    assert ours == theirs.num_parameters() - unread + 28 * 768
    assert ours / 1e9 == pytest.approx(560, abs=3)


OURS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 3,
    "ffn_hidden_size": 40,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 9,
    "vocab_size": 50,
}
EXPERTS = {
    "num_experts": 4,
    "moe_num_zero_experts": 2,
    "moe_router_topk": 3,
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": True,
    "moe_ffn_hidden_size": 12,
    "moe_router_load_balancing_type": ["none"],
}


def test_flops_are_those_that_torch_counts(host, randomize) -> None:
    """Experts are dealt in turn, so that each has as many tokens: 16 of 48 choices return the token."""
    keys = {**OURS, "vocab_size": 384, "moe": {**EXPERTS, "moe_router_force_load_balancing": True}}
    keys["moe"]["moe_router_enable_expert_bias"] = False
    model = ref.build_from(host, {"family": "longcat_flash", **keys})
    randomize(model)
    flops = flops_per_token(model.config, 16, convention="full")
    projections = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    ref.assert_active_flops(model, flops, {"attention_projections": projections})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mtp_num_layers": 2}, "mtp_num_layers=2 is not supported by model.family=longcat_flash"),
        ({"moe": {**EXPERTS, "moe_layer_freq": 2}}, "moe_layer_freq=2 has layers without experts"),
        ({"moe": {**EXPERTS, "moe_router_topk": 7}}, "and model.moe.moe_num_zero_experts=2; a token can have 1 to 6"),
        ({"moe": {**EXPERTS, "moe_expert_capacity_factor": 1.0}}, "cannot be combined with model.moe.moe_expert_cap"),
        ({"moe": {**EXPERTS, "moe_token_dispatcher_type": "flex"}}, "cannot be combined with .*=flex"),
        ({"moe": None}, "model.moe.num_experts is not set"),
    ],
)
def test_impossible_models_are_refused(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ref.build_from(host, {"family": "longcat_flash", **OURS, "moe": EXPERTS, **keys})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is not supported"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported; it can be 2 num_layers = 4"),
        ({"head_dim": 8}, "head_dim=8 is not supported; it can be qk_rope_head_dim = 6"),
        ({"qk_head_dim": 8}, "qk_head_dim=8 is not supported"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora=False is not supported"),
        ({"zero_expert_type": "copy"}, "zero_expert_type='copy' is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ({"n_routed_experts": 0}, "n_routed_experts=0 is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config({"model_type": "longcat_flash", **external, **fields})
