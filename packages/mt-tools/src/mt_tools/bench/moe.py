"""An MoE layer with each grouped GEMM, beside a dense layer of the same FLOPs per token.

One process, with the router forced to an even load, so that the products are the same in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.kernels.choice import use_kernels
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_tools.bench.device_timing import medians
from mt_tools.bench.machine import Machine
from mt_tools.bench.report import Case

PRODUCTS: dict[str, dict[str, object]] = {
    "loop": {"moe_grouped_gemm": "loop"},
    "grouped": {"moe_grouped_gemm": "grouped"},
    "triton": {"moe_grouped_gemm": "triton"},
    "triton of permuted rows": {"moe_grouped_gemm": "triton", "moe_permute_fusion": "false"},
}
"""Options of each grouped GEMM. `triton` is the default on a GPU, and gathers rows by pointers; of rows that torch
permutes it reads both operands by TMA."""


@dataclass(frozen=True)
class MoeShape:
    """Experts of three matrices (SwiGLU). ffn: the inner width of one."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int

    @property
    def label(self) -> str:
        return f"{self.tokens} tokens, {self.experts} experts of {self.hidden} x {self.ffn}, top-{self.topk}"

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.tokens * self.topk * 3 * self.hidden * self.ffn  # gate, up and down


SHAPES = (MoeShape(4096, 4096, 14336, 8, 2), MoeShape(32768, 2048, 768, 128, 8))
"""Shapes of Mixtral 8x7B and Qwen3-30B-A3B."""
SMALL = (MoeShape(64, 64, 128, 8, 2), MoeShape(128, 64, 32, 16, 8))


def measure_moe(machine: Machine, rounds: int, host: PluginHost) -> Iterator[Case]:
    for shape in SHAPES if machine.is_gpu else SMALL:
        yield measure(shape, machine, rounds, host)


def measure(shape: MoeShape, machine: Machine, rounds: int, host: PluginHost) -> Case:
    """TFLOP/s count the experts' matrix products only, and the backward pass as two forward passes."""
    layers, refused = layers_for(shape, machine, host)
    x = torch.randn(1, shape.tokens, shape.hidden, device=machine.device, dtype=machine.dtype).requires_grad_()
    forward = {name: [torch.no_grad()(partial(layer, x))] for name, layer in layers.items()}
    step = {name: [partial(_step, layer, x)] for name, layer in layers.items()}
    return {
        "name": f"moe {shape.label}",
        "cannot": refused,
        "forward": _rows(medians(forward, machine.device, rounds), shape.forward_flops, machine),
        "step": _rows(medians(step, machine.device, rounds), 3.0 * shape.forward_flops, machine),
    }


def layers_for(shape: MoeShape, machine: Machine, host: PluginHost) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """(layer by the grouped GEMM of its experts, and "dense"; reasons why the others cannot run)"""
    # topk experts side by side have as many FLOPs per token.
    layers = {"dense": build_layer(shape, machine, host, "dense", ffn=shape.ffn * shape.topk)}
    refused = {}
    for product, product_options in PRODUCTS.items():
        options = {
            "num_experts": shape.experts,
            "moe_router_topk": shape.topk,
            "moe_router_force_load_balancing": "true",
            **product_options,
        }
        try:
            layers[product] = build_layer(shape, machine, host, "moe", ffn=shape.ffn, moe=options)
        except ConfigError as reason:
            refused[product] = str(reason)
    return layers, refused


def build_layer(
    shape: MoeShape, machine: Machine, host: PluginHost, name: str, *, ffn: int, moe: dict[str, object] | None = None
) -> nn.Module:
    """The feed-forward `name`, with weights of seed 0. Raises ConfigError if it cannot be built."""
    settings = [
        f"model.hidden_size={shape.hidden}",
        f"model.ffn_hidden_size={ffn}",
        "model.num_attention_heads=4",
        "model.num_query_groups=4",
        "model.num_layers=1",
        "train.train_iters=1",
        *(f"model.moe.{key}={value}" for key, value in (moe or {}).items()),
    ]
    config = load_config(preset="llama3.2-1b", overrides=settings, host=host).config
    ctx = ParallelContext(device=machine.device, params_dtype=machine.dtype)
    environment = ModelBuildContext(config, ctx, host)
    layer = environment.feed_forward(name, config.model, 0)
    use_kernels(layer.modules(), environment.kernels)
    initialize(layer, 0, ctx)
    return layer


def _step(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert isinstance(layer, nn.Module)
    inputs = [x, *layer.parameters()]
    out = layer(x)
    torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)


def _rows(taken: dict[str, float], flops: float, machine: Machine) -> dict[str, dict[str, float]]:
    return {
        name: {
            "ms": seconds * 1e3,
            "tflops": flops / seconds / 1e12,
            "percent_of_floor": 100.0 * flops / machine.gemm_rate / seconds,
        }
        for name, seconds in taken.items()
    }
