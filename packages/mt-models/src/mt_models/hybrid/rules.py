"""Rules of the name maps for one attention or feed-forward block."""

from __future__ import annotations

from mt_core.name_map import Concatenate, GroupedQKV, Rule, Same
from mt_models.hybrid.config import HybridConfig


def attention_rules(config: HybridConfig, ours: str, theirs: str) -> list[Rule]:
    """q_proj, k_proj and v_proj in one matrix; o_proj. `ours` and `theirs` end in a dot."""
    qkv = tuple(f"{theirs}{name}_proj.weight" for name in "qkv")
    return [
        GroupedQKV(f"{ours}linear_qkv.weight", qkv, groups=config.query_groups, heads=config.num_attention_heads),
        Same(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight"),
    ]


def plain_feed_forward_rules(ours: str, theirs: str) -> list[Rule]:
    return [
        Same(f"{ours}linear_fc1.weight", f"{theirs}up_proj.weight"),
        Same(f"{ours}linear_fc2.weight", f"{theirs}down_proj.weight"),
    ]


def gated_feed_forward_rules(ours: str, theirs: str) -> list[Rule]:
    """gate_proj and up_proj in one matrix; down_proj."""
    return [
        # gate rows first, as in every gated feed-forward here
        Concatenate(f"{ours}linear_fc1.weight", (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")),
        Same(f"{ours}linear_fc2.weight", f"{theirs}down_proj.weight"),
    ]
