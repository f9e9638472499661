"""Kimi Linear against `transformers`, and the two forms of its delta rule against one another."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError
from mt_models.blocks.gated_delta_rule import DeltaInputs
from mt_models.blocks.kimi_delta_rule import chunked_kimi_rule, recurrent_kimi_rule
from mt_models.kimi_linear.flops import flops_per_token

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
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "linear_num_heads": 5,
    "linear_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
NO_GRADIENT = ("router.expert_bias",)


def reference_of(**keys) -> nn.Module:
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**{**SHAPE, **keys}))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    "keys", [{}, {"q_lora_rank": 14, "num_expert_group": 3, "topk_group": 2, "rms_norm_eps": 1e-6}]
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


def random_inputs(length: int) -> DeltaInputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, 3, size, generator=generator, dtype=torch.float64) for size in (5, 5, 4))
    # Decays from nearly none to e^-60 within a position.
    g = -torch.exp(6 * torch.rand(2, length, 3, 5, generator=generator, dtype=torch.float64) - 2)
    return DeltaInputs(q, k, v, g, torch.rand(2, length, 3, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("with_documents", [False, True])
def test_chunks_compute_what_the_recurrence_does(with_documents) -> None:
    inputs = DeltaInputs(*(x.requires_grad_() for x in random_inputs(13)))
    segments = torch.tensor([[0] * 3 + [1] * 2 + [0] * 8, [0] * 5 + [4] * 8]) if with_documents else None
    state = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for rule, options in ((recurrent_kimi_rule, {}), (chunked_kimi_rule, {"chunk_size": 4})):
        o, last = rule(inputs, state=state, segment_ids=segments, **options)
        found.append((o, last, *torch.autograd.grad(o.square().sum() + last.sum(), list(inputs))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)


def test_documents_are_computed_as_if_alone() -> None:
    inputs = random_inputs(11)
    segments = torch.tensor([[0] * 4 + [1] * 7]).expand(2, -1)
    both = recurrent_kimi_rule(inputs, segment_ids=segments)[0]
    alone = [recurrent_kimi_rule(DeltaInputs(*(x[:, part] for x in inputs)))[0] for part in (slice(4), slice(4, None))]
    torch.testing.assert_close(both, torch.cat(alone, 1))


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
    lists = {"layer_types": ([LINEAR] * 3 + [FULL]) * 6 + [LINEAR] * 2 + [FULL]}
    shapes = {"kimi-linear-48b-a3b": (transformers.KimiLinearConfig, transformers.KimiLinearForCausalLM, lists)}
    ref.assert_presets_match(host, "kimi_linear", shapes)


def test_flops_of_parts(build) -> None:
    """A layer of latent attention costs what it costs in a deepseek of as many such layers."""
    config = build(family="kimi_linear", **OURS).config
    one, three = (flops_per_token(config.model_copy(update={"linear_attention_freq": n}), 16) for n in (3, 1))
    assert three.attention_projections == pytest.approx(3 * one.attention_projections)
    assert three.linear_projections == three.linear_rule == 0
    # q, k, v, b; decays and gates through 6 channels; values out. Two layers, 2 operations a multiply-add.
    assert one.linear_projections == 2 * 2 * (32 * (36 + 2) + 2 * (32 * 6 + 6 * 12) + 12 * 32)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"linear_num_value_heads": 4}, "linear_num_key_heads=2 and model.linear_num_value_heads=4 have to be equal"),
        ({"linear_value_head_dim": 8}, "linear_key_head_dim=6 and model.linear_value_head_dim=8 have to be equal"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 is not supported by model.family=kimi_linear"),
        ({"rotary_base": 5.0}, "rotary_base=5.0 would be ignored: this family has no positions"),
    ],
)
def test_impossible_shapes_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="kimi_linear", **{**OURS, **keys})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is not supported"),
        ({"moe_renormalize": False}, "moe_renormalize=False is not supported"),
        (
            {"layer_types": None, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}},
            "each layer from 1",
        ),
        ({"mla_use_nope": False}, "mla_use_nope=False is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "kimi_linear").read_config({"model_type": "kimi_linear", **external, **fields})
