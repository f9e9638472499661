"""The sizes that a model is pruned to, and the section [model] with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_core.errors import ConfigError

FAMILIES = ("llama", "mistral", "mixtral", "qwen", "qwen_moe", "seed_oss")
"""Families of pre-norm layers with RMSNorm, grouped queries and a gated feed-forward or routed experts, whose tensors
`dimensions` knows."""


@dataclass(frozen=True)
class Sizes:
    """None: as it is. depth: layers; width: channels of the residual stream; ffn: inner channels of dense
    feed-forwards; heads: query heads; experts: routed experts of a layer."""

    depth: int | None = None
    width: int | None = None
    ffn: int | None = None
    heads: int | None = None
    experts: int | None = None


def require_prunable(model: Any, sizes: Sizes) -> None:
    """Raises ConfigError for another family, and for a size that the model cannot be pruned to. model: its
    configuration."""
    if model.family not in FAMILIES:
        raise ConfigError(
            f"model.family={model.family}: mt tune prune knows which tensors a dimension touches for "
            f"{', '.join(FAMILIES)}"
        )
    if sizes == Sizes():
        raise ConfigError("nothing is to be pruned; give --depth, --width, --ffn, --heads or --experts")
    experts = None if model.moe is None else model.moe["num_experts"]
    present = {
        "depth": (sizes.depth, model.num_layers, "layers (model.num_layers)"),
        "width": (sizes.width, model.hidden_size, "channels (model.hidden_size)"),
        "ffn": (sizes.ffn, model.ffn_size, "inner channels (model.ffn_hidden_size)"),
        "heads": (sizes.heads, model.num_attention_heads, "query heads (model.num_attention_heads)"),
        "experts": (sizes.experts, experts, "experts (model.moe.num_experts)"),
    }
    for name, (wanted, size, what) in present.items():
        if wanted is not None and size is None:
            raise ConfigError(f"--{name} {wanted}: model.family={model.family} is a dense model, without experts")
        if wanted is not None and size is not None and not 0 < wanted < size:
            raise ConfigError(f"--{name} {wanted}: the model has {size} {what}; give a number from 1 to {size - 1}")
    _require_heads(model, sizes)
    _require_experts(model, sizes)


def _require_heads(model: Any, sizes: Sizes) -> None:
    groups = model.query_groups
    if sizes.heads is not None and groups != model.num_attention_heads and sizes.heads % groups:
        legal = ", ".join(str(groups * n) for n in range(1, model.num_attention_heads // groups))
        raise ConfigError(
            f"--heads {sizes.heads}: each of the {groups} key-value heads keeps as many query heads; give {legal}"
            if legal
            else f"--heads {sizes.heads}: each of the {groups} key-value heads has one query head alone"
        )


def _require_experts(model: Any, sizes: Sizes) -> None:
    if model.moe is None:
        return
    if sizes.ffn is not None:
        raise ConfigError(
            f"--ffn {sizes.ffn}: model.family={model.family} has experts, whose widths are not pruned; give --experts"
        )
    if sizes.depth is not None and model.moe.get("moe_layer_freq", 1) != 1:
        raise ConfigError(
            f"--depth {sizes.depth}: model.moe.moe_layer_freq={model.moe['moe_layer_freq']} says by number which "
            "layers have experts; leave --depth out"
        )
    if sizes.experts is None:
        return
    chosen = model.moe.get("moe_router_topk", 2)
    if sizes.experts < chosen:
        raise ConfigError(
            f"--experts {sizes.experts}: a token goes to {chosen} experts (model.moe.moe_router_topk); give {chosen} "
            "or more"
        )
    if model.moe.get("moe_router_num_groups"):
        raise ConfigError(
            f"--experts {sizes.experts}: model.moe.moe_router_num_groups={model.moe['moe_router_num_groups']} puts "
            "experts into groups of one size; leave --experts out"
        )


def pruned_section(model: Any, stored: dict[str, Any], sizes: Sizes, layers: tuple[int, ...]) -> dict[str, Any]:
    """[model] of the smaller model. stored: the section of the larger one. layers: those that are kept."""
    # What defaults follow from would change with the sizes: they are written as they were.
    section = {**stored, "kv_channels": model.head_dim, "ffn_hidden_size": sizes.ffn or model.ffn_size}
    section["num_layers"] = len(layers)
    if sizes.width is not None:
        section["hidden_size"] = sizes.width
    if sizes.heads is not None:
        section["num_attention_heads"] = sizes.heads
        section["num_query_groups"] = min(model.query_groups, sizes.heads)
    if sizes.experts is not None:
        section["moe"] = {**stored["moe"], "num_experts": sizes.experts}
    # The first layers see everything, those behind them a window.
    if stored.get("max_window_layers"):
        section["max_window_layers"] = sum(layer < stored["max_window_layers"] for layer in layers)
    return section
