"""FLOPs of Mamba and hybrid models from the configuration against torch's count of what the forward computes."""

from __future__ import annotations

import pytest
import torch
from tests.models.mamba_reference import build, configure
from torch.utils.flop_counter import FlopCounterMode

from mt_core.errors import ConfigError
from mt_models.blocks import convolutions
from mt_models.hybrid import config as hybrid_flops
from mt_models.mamba import config as mamba_flops

MAMBA = {
    "hidden_size": 64,
    "vocab_size": 301,
    "make_vocab_size_divisible_by": 1,
    "mamba_head_dim": 16,
    "mamba_state_dim": 12,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 8,
}
LENGTHS = (5, 16, 21)
"""Below a chunk, whole chunks, and a last chunk that is filled up."""


@pytest.fixture(autouse=True)
def convolutions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts its convolutions and not the sums in their place on a CPU."""
    monkeypatch.setattr(convolutions, "can_shift", lambda x, weight: False)


def count(model: torch.nn.Module, length: int) -> tuple[float, dict[str, float]]:
    """For each token: all, and by the last word of the module's name."""
    tokens = torch.zeros(2, length, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens)
    by_module: dict[str, float] = {}
    for name, operations in counter.get_flop_counts().items():
        last = name.split(".")[-1]
        by_module[last] = by_module.get(last, 0.0) + sum(operations.values()) / tokens.numel()
    return counter.get_total_flops() / tokens.numel(), by_module


@pytest.mark.parametrize("length", LENGTHS)
def test_mamba_by_part(host, length) -> None:
    model = build(host, configure(host, family="mamba", num_layers=3, **MAMBA)).eval()
    total, counted = count(model, length)
    flops = mamba_flops.flops_per_token(model.config, length, convention="full")
    assert flops.forward == pytest.approx(total, rel=0.01)
    assert flops.projections == pytest.approx(counted["in_proj"] + counted["out_proj"], rel=0.01)
    inside = counted["mixer"] - counted["in_proj"] - counted["out_proj"]
    assert flops.convolution + flops.scan == pytest.approx(inside, rel=0.01)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_hybrid_by_part(host, length) -> None:
    keys = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 24, "ffn_hidden_size": 96}
    pattern = {"hybrid_layer_pattern": "MM-*-M", "attention_backend": "eager"}
    model = build(host, configure(host, family="hybrid", **MAMBA, **keys, **pattern)).eval()
    total, counted = count(model, length)
    flops = hybrid_flops.flops_per_token(model.config, length, convention="full")
    assert flops.forward == pytest.approx(total, rel=0.01)
    assert flops.mamba_projections == pytest.approx(counted["in_proj"] + counted["out_proj"], rel=0.01)
    assert flops.mamba_convolution + flops.mamba_scan + flops.mamba_projections == pytest.approx(
        counted["mixer"], rel=0.01
    )
    projections = counted["linear_qkv"] + counted["linear_proj"]
    assert flops.attention_projections == pytest.approx(projections, rel=0.01)
    assert flops.attention_core == pytest.approx(counted["self_attention"] - projections, rel=0.01)
    assert flops.feed_forward == pytest.approx(counted["mlp"], rel=0.01)


@pytest.mark.parametrize("length", LENGTHS)
def test_seen_positions_are_those_before_a_token_in_its_chunk(host, length) -> None:
    config = configure(host, family="mamba", num_layers=1, **MAMBA).model
    partners = [position % 8 + 1 for position in range(length)]
    inner, groups, state = 128, 2, 12
    expected = sum(2 * n * (groups * state + inner) + 4 * inner * state for n in partners) / length
    assert mamba_flops.flops_per_token(config, length).scan == pytest.approx(expected)


def test_experts_need_their_own_count(host) -> None:
    keys = {"num_attention_heads": 4, "hybrid_layer_pattern": "M-*-"}
    config = configure(host, family="hybrid", **MAMBA, **keys).model
    config = config.model_copy(update={"hybrid_layer_pattern": "ME*E", "moe": {}})
    with pytest.raises(ConfigError, match="layers of experts .E. are counted by the plugin that brings them"):
        hybrid_flops.flops_per_token(config, 16)
    assert hybrid_flops.flops_per_token(config, 16, experts=7.0).feed_forward == 14.0
