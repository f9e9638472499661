"""The MoE layer against the bare matrix products of its tokens plus a sort, and against a dense layer, on CPU in fp32.

    uv run python bench/moe_layer.py [--rounds 15] [--threads 2]

Forward and backward. Pieces are interleaved, one of each in turn; a ratio is the median of the ratios of rounds.
The router is forced to an even load, so that the products are the same in every round.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.feed_forward import DenseFeedForward
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_moe.config import read_moe_config
from mt_moe.layer import MoeLayer, build_dispatcher


@dataclass(frozen=True)
class Shape:
    """Stands in for a model's configuration."""

    hidden_size: int
    ffn_size: int
    activation: Any = "swiglu"
    add_bias_linear: bool = False
    init_method_std: float = 0.02
    output_init_std: float = 0.02
    num_layers: int = 1
    moe: dict[str, Any] = field(default_factory=dict)


CASES = {
    "8 experts of 512 x 1024, top-2": (Shape(512, 1024), 8, 2),
    "64 experts of 512 x 256, top-8": (Shape(512, 256), 64, 8),
}
TOKENS = 1024


def moe_layer(shape: Shape, experts: int, topk: int) -> MoeLayer:
    values = {"num_experts": experts, "moe_router_topk": topk, "moe_router_force_load_balancing": True}
    config, ctx = read_moe_config(values), ParallelContext()
    layer = MoeLayer(shape, config, build_dispatcher(config, ctx, load_plugins()), 0, ctx)
    initialize(layer, 0, ctx)
    return layer


def dense_layer(shape: Shape, topk: int) -> DenseFeedForward:
    """As many active FLOPs as the mixture's experts."""
    layer = DenseFeedForward(Shape(shape.hidden_size, shape.ffn_size * topk), ParallelContext())
    initialize(layer, 0, ParallelContext())
    return layer


def step(layer: torch.nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward of a layer."""

    def run() -> None:
        layer.zero_grad()
        layer(x).backward(x.detach())

    return run


def bare_products(shape: Shape, experts: int, topk: int) -> Callable[[], None]:
    """Every matrix product of the experts, forward and backward, on rows that are in order already; and a sort."""
    rows = TOKENS * topk
    x, inner = torch.randn(rows, shape.hidden_size), torch.randn(rows, shape.ffn_size)
    fc1 = torch.randn(experts, 2 * shape.ffn_size, shape.hidden_size)
    fc2 = torch.randn(experts, shape.hidden_size, shape.ffn_size)
    keys = torch.randint(experts, (rows,))

    def run() -> None:
        keys.argsort(stable=True)
        kept = []  # as a training step keeps them: results in memory of their own
        for own_x, own_inner, first, second in zip(x.chunk(experts), inner.chunk(experts), fc1, fc2, strict=True):
            both, out = F.linear(own_x, first), F.linear(own_inner, second)
            kept.append((both, out, out @ second, out.T @ own_inner, both @ first, both.T @ own_x))

    return run


def measure(pieces: dict[str, Callable[[], None]], rounds: int) -> list[dict[str, float]]:
    """Seconds of each piece, round by round, after two to warm up."""
    found = []
    for _ in range(rounds + 2):
        seconds = {}
        for name, run in pieces.items():
            started = time.perf_counter()
            run()
            seconds[name] = time.perf_counter() - started
        found.append(seconds)
    return found[2:]


def ratio(rounds: list[dict[str, float]], above: str, below: str) -> float:
    return statistics.median(seconds[above] / seconds[below] for seconds in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {platform.machine()}, {TOKENS} tokens, fp32")
    for name, (shape, experts, topk) in CASES.items():
        x = torch.randn(1, TOKENS, shape.hidden_size, requires_grad=True)
        pieces = {
            "moe": step(moe_layer(shape, experts, topk), x),
            "bare": bare_products(shape, experts, topk),
            "dense": step(dense_layer(shape, topk), x),
        }
        rounds = measure(pieces, arguments.rounds)
        milliseconds = 1000 * statistics.median(seconds["moe"] for seconds in rounds)
        print(
            f"{name}: {milliseconds:.1f} ms; {ratio(rounds, 'moe', 'bare'):.2f} times the bare products and a sort; "
            f"{ratio(rounds, 'dense', 'moe'):.2f} times the tokens/s of a dense layer with the same active FLOPs"
        )


if __name__ == "__main__":
    main()
