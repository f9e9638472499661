"""Layers to test, and a reference that sees one token and one expert at a time."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import initialize, parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_moe.config import MoeConfig, read_moe_config
from mt_moe.layer import MoeLayer, Recomputed, build_dispatcher

HIDDEN, FFN, EXPERTS = 8, 12, 8


@dataclass(frozen=True)
class Shape:
    """Stands in for a model's configuration."""

    hidden_size: int = HIDDEN
    ffn_size: int = FFN
    activation: Any = "swiglu"
    add_bias_linear: bool = False
    init_method_std: float = 0.5
    output_init_std: float = 0.5
    num_layers: int = 4
    moe: dict[str, Any] = field(default_factory=dict)


def options(**keys: Any) -> MoeConfig:
    return read_moe_config({"num_experts": EXPERTS, "moe_router_topk": 2, **keys})


def build_layer(
    config: MoeConfig, ctx: ParallelContext, shape: Shape | None = None, recompute: Collection[Recomputed] = ()
) -> MoeLayer:
    """Layer 0, with weights that depend on no layout and biases that are not zero."""
    shape = shape or Shape()
    module = MoeLayer(shape, config, build_dispatcher(config, ctx, load_plugins()), 0, ctx, recompute)
    initialize(module, 7, ctx)
    layouts = parameter_layouts(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                shape_of = layouts[name].shape
                values = torch.linspace(-0.5, 0.5, math.prod(shape_of)).view(shape_of)
                parameter.copy_(layouts[name].to_local(values, ctx))
    return module


def fp64(**fields: Any) -> ParallelContext:
    return ParallelContext(params_dtype=torch.float64, **fields)


def tokens_of(batch: int, length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=generator).to(dtype)


def dense_loop(layer: MoeLayer, tokens: Tensor, experts: Tensor, weights: Tensor, kept: Tensor | None = None) -> Tensor:
    """sum_j weights[t, j] W2[e] swiglu(W1[e] x[t] + b1[e]) + b2[e], one token and one expert after another."""
    fc1, fc2 = layer.experts.linear_fc1, layer.experts.linear_fc2
    rows = []
    for t in range(len(tokens)):
        total = tokens.new_zeros(tokens.shape[1])
        for j in range(experts.shape[1]):
            if kept is not None and not kept[t, j]:
                continue
            e = int(experts[t, j])
            inner = F.linear(tokens[t], fc1.weight[e], None if fc1.bias is None else fc1.bias[e])
            gate, up = inner.chunk(2)
            out = F.linear(F.silu(gate) * up, fc2.weight[e], None if fc2.bias is None else fc2.bias[e])
            total = total + weights[t, j] * out
        rows.append(total)
    return torch.stack(rows) if rows else tokens
