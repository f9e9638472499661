"""Hy4 against `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError
from mt_models.hy_v4.flops import flops_per_token

transformers = pytest.importorskip("transformers")

VOCAB = 89
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "swiglu_limit": 0.1,
    "index_topk": 7,
    # Many heads: a key that none of them looks at has a score of exactly 0, as others have.
    "index_n_heads": 13,
    "index_head_dim": 10,
    "hc_mult": 3,
    # Small norms behind sums of streams would make gradients of their weights differences of large terms.
    "rms_norm_eps": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
OTHERWISE = {
    "hc_mult": 2,
    "hc_magnitude": 1.5,
    "hc_eps": 0.01,
    "n_group": 3,
    "topk_group": 2,
    "indexer_types": ["full", "shared", "full", "shared"],
    "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 128,
}  # fmt: skip
NO_GRADIENT = (
    "router.expert_bias",
    *("linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias", "linear_weights_proj.weight"),
)


def reference_of(**keys) -> nn.Module:
    model = transformers.HYV4ForCausalLM(transformers.HYV4Config(**{**SHAPE, **keys}))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize("keys", [{}, OTHERWISE], ids=["as published", "grouped experts, YaRN"])
def test_logits_gradients_and_continuations_equal_the_reference(host, randomize, keys) -> None:
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), NO_GRADIENT)
    ref.assert_maps_round_trip(pair)
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 18)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    ref.assert_presets_match(
        host, "hy_v4", {"hy4-preview": (transformers.HYV4Config, transformers.HYV4ForCausalLM, {})}
    )


OURS: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 9,
    "dsa_indexer_n_heads": 5,
    "dsa_indexer_head_dim": 10,
    "dsa_indexer_topk": 5,
    "hyper_connection_streams": 3,
    "vocab_size": 50,
}


def test_streams_start_with_the_mean_as_input_and_the_output_added_to_each(build) -> None:
    connection = build(family="hy_v4", **OURS).decoder.layers[0].attention_connection
    nn.init.zeros_(connection.weight)
    streams = torch.randn(2, 5, 3 * 32, generator=torch.Generator().manual_seed(3))
    block_input, post = connection(streams)
    torch.testing.assert_close(block_input, streams.unflatten(-1, (3, 32)).mean(-2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(post, torch.ones(2, 5, 3), atol=1e-5, rtol=1e-5)


def test_flops_of_parts(build) -> None:
    """By hand, 2 operations a multiply-add, of 4 positions, at which no key is left out."""
    flops = flops_per_token(build(family="hy_v4", **OURS).config, 4)
    queries, latents = 32 * 14 + 14 * 4 * 18, 32 * 16 + 10 * 4 * 21
    assert flops.attention_projections == 3 * 2 * (queries + latents + 2 * 32 * 4 * 9)
    assert flops.attention_core == 3 * 2 * 2.5 * 4 * (18 + 9)
    assert flops.connections == 2 * (6 * (6 + 1) + 3 + 1) * 3 * 32
    assert flops.indexer == 0.0
    assert flops.training == 3 * flops.forward


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 is not supported"),
        ({"dsa_indexer_head_dim": 4}, "dsa_indexer_head_dim=4 is below"),
        ({"attention_backend": "flex"}, "flex"),
    ],
)
def test_impossible_shapes_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build("data.seq_length=16", family="hy_v4", **{**OURS, **keys})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["full_attention"] * 4}, "indexed_attention alone"),
        ({"indexer_types": ["full"]}, "indexer_types=.* has to be one for each of"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types=.* is not supported"),
        ({"mlp_layer_types": ["hash"] * 4}, "dense or sparse"),
        ({"n_shared_experts": 0}, "n_shared_experts=0 is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "hy_v4").read_config({"model_type": "hy_v4", **external, **fields})
