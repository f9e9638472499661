"""Number of parameters of a model, in total and active per token."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from mt_core.config.schema import Config
from mt_core.nn.layout import parameter_layouts
from mt_core.plugins import PluginHost


@dataclass(frozen=True)
class ParameterCount:
    """total: of the whole model. experts: parameters of routed experts among these. active: used by one token."""

    total: int
    experts: int
    active: int
    experts_of_a_layer: int = 0
    """Number of routed experts."""


def count_parameters(config: Config, host: PluginHost, model: nn.Module) -> ParameterCount:
    """Counts a model built in one process, without padding of its vocabulary. Expert parameters are those that expert
    parallelism shards."""
    sizes = [(layout, prod(layout.shape)) for layout in parameter_layouts(model).values()]
    total = sum(size for _, size in sizes)
    experts = sum(size for layout, size in sizes if any(split.axis == "ep" for split in layout.splits))
    of_a_layer, share = experts_of_a_layer(config, host)
    # A token uses top-k of the experts of each layer.
    return ParameterCount(total, experts, total - experts + round(experts * share), of_a_layer)


def experts_of_a_layer(config: Config, host: PluginHost) -> tuple[int, float]:
    """(routed experts, fraction of them that a token uses); 0 and 1 for a model without experts."""
    options: dict[str, Any] | None = getattr(config.model, "moe", None)
    if options is None:
        return 0, 1.0
    defaults: Any = host.feed_forwards.get("moe", asker="model.moe").config_type.load()
    values = defaults.model_validate(options)
    return values.num_experts, values.moe_router_topk / values.num_experts
