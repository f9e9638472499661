"""FLOPs from the configuration against torch's count of what the forward computes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionPattern
from mt_models.flops import flops_per_token

SMALL = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 301}
MODELS = {
    "gpt": {"max_position_embeddings": 16},
    "llama": {"num_query_groups": 2, "ffn_hidden_size": 96},
    "mistral": {"num_query_groups": 1, "sliding_window": 5},
    "qwen": {"num_query_groups": 2, "kv_channels": 24},
    "gemma": {"num_query_groups": 2, "kv_channels": 32, "sliding_window": 5, "sliding_window_pattern": 2},
}
PARTS = {
    "attention_projections": ("linear_qkv", "linear_proj"),
    "feed_forward": ("linear_fc1", "linear_fc2"),
}


@pytest.mark.parametrize("family", MODELS)
def test_each_part_equals_what_torch_counts(build, family) -> None:
    model = build(family=family, **SMALL, **MODELS[family], attention_backend="eager")
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    flops = flops_per_token(model.config, 16, convention="full")
    assert flops.forward * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.01)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    for part, names in PARTS.items():
        counted = sum(n for name, n in counts.items() if name.endswith(names))
        assert getattr(flops, part) * tokens.numel() == pytest.approx(counted, rel=0.01), part


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
def test_seen_keys_are_those_that_the_mask_leaves(build, window) -> None:
    keys = {} if window is None else {"sliding_window": window}
    model = build(family="mistral", **SMALL, **keys)
    mask = AttentionPattern(window=window).additive_mask(16, 16, torch.float32, torch.device("cpu"))
    seen = (mask == 0).sum().item() / 16
    assert flops_per_token(model.config, 16).attention_core == pytest.approx(3 * 4 * 64 * seen)


def test_llama_3_8b_at_8192_is_the_number_that_others_publish(host) -> None:
    """6 x 7.505e9 weights in products + 6 x 32 layers x 8192 x 4096 causal, per token of training."""
    from tests.models.decoder_reference import build_preset

    flops = flops_per_token(build_preset(host, "llama3-8b").config, 8192)
    assert flops.training / 1e9 == pytest.approx(51.47, rel=1e-3)


def test_a_mixture_of_experts_needs_its_own_count(build) -> None:
    config = build(family="llama", **SMALL).config.model_copy(update={"moe": {"num_experts": 8}})
    with pytest.raises(ConfigError, match='the feed-forward "moe" is counted by the plugin that brings it'):
        flops_per_token(config, 16)
    dense = flops_per_token(config.model_copy(update={"moe": None}), 16)
    assert flops_per_token(config, 16, feed_forward=7.0).feed_forward == 21.0
    assert flops_per_token(config, 16, feed_forward=7.0).output == dense.output
