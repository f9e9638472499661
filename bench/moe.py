"""The MoE layer against the bare matrix products of its tokens plus a sort, and against a dense layer, on CPU in fp32.

    uv run python bench/moe.py [--rounds 15] [--threads 1]

Prints JSON. Forward and backward, in processor time. Cases are interleaved, one of each in turn; a ratio is the median
of the ratios of rounds. The router is forced to an even load, so that the products are the same in every round; with
--uneven it is left to itself, and the bare products take the numbers of rows that it gives.

glibc hands freed tensors above 32 MiB back to the system and gets them anew, page by page, which costs the layer's
gradients (one tensor for all experts) and not the bare products (one for each). To leave that out:

    MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296 uv run python bench/moe.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
from mt_moe.tokens import share_tokens
from mt_tools.bench.report import conditions
from mt_tools.bench.timing import alternating, elapsed, ratio


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


@dataclass(frozen=True)
class Case:
    shape: Shape
    experts: int
    topk: int
    tokens: int = 1024


CASES = {
    "8 experts of 512 x 1024, top-2": Case(Shape(512, 1024), 8, 2),
    "64 experts of 512 x 256, top-8": Case(Shape(512, 256), 64, 8),
    "8 experts of 1024 x 3584, top-2 (a quarter of Mixtral 8x7B's sizes)": Case(Shape(1024, 3584), 8, 2),
}
MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def moe_layer(case: Case, even: bool) -> MoeLayer:
    keys = {"num_experts": case.experts, "moe_router_topk": case.topk, "moe_router_force_load_balancing": even}
    config, ctx = read_moe_config(keys), ParallelContext()
    layer = MoeLayer(case.shape, config, build_dispatcher(config, ctx, load_plugins()), 0, ctx)
    initialize(layer, 0, ctx)
    return layer


def dense_layer(case: Case) -> DenseFeedForward:
    """As many active FLOPs as the MoE layer's experts."""
    layer = DenseFeedForward(Shape(case.shape.hidden_size, case.shape.ffn_size * case.topk), ParallelContext())
    initialize(layer, 0, ParallelContext())
    return layer


def step(layer: torch.nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward of a layer."""

    def run() -> None:
        layer.zero_grad()
        layer(x).backward(x.detach())

    return run


def bare_products(case: Case, counts: list[int]) -> Callable[[], None]:
    """Every matrix product of the experts, forward and backward, on rows that are in order already; and a sort."""
    shape, rows = case.shape, case.tokens * case.topk
    x, inner = torch.randn(rows, shape.hidden_size), torch.randn(rows, shape.ffn_size)
    fc1 = torch.randn(case.experts, 2 * shape.ffn_size, shape.hidden_size)
    fc2 = torch.randn(case.experts, shape.hidden_size, shape.ffn_size)
    keys = torch.randint(case.experts, (rows,))

    def run() -> None:
        keys.argsort(stable=True)
        kept = []  # as a training step keeps them: results in memory of their own
        for own_x, own_inner, first, second in zip(x.split(counts), inner.split(counts), fc1, fc2, strict=True):
            both, out = F.linear(own_x, first), F.linear(own_inner, second)
            kept.append((both, out, out @ second, out.T @ own_inner, both @ first, both.T @ own_x))

    return run


def measure_case(case: Case, rounds: int, even: bool) -> dict[str, Any]:
    x = torch.randn(1, case.tokens, case.shape.hidden_size, requires_grad=True)
    layer = moe_layer(case, even)
    # The numbers of rows that the layer's own router gives, so that both multiply the same shapes.
    counts = layer.router(share_tokens(x, layer.ctx)).experts.flatten().bincount(minlength=case.experts).tolist()
    cases = {"moe": step(layer, x), "bare": bare_products(case, counts), "dense": step(dense_layer(case), x)}
    times = alternating(cases, rounds, measure=partial(elapsed, clock=time.process_time))
    return {
        "tokens": case.tokens,
        "largest_over_mean_load": round(max(counts) * case.experts / sum(counts), 2),
        "milliseconds": {name: round(1000 * statistics.median(spent), 1) for name, spent in times.items()},
        "time_over_bare_products_and_sort": round(ratio(times, "moe", "bare"), 3),
        "tokens_per_second_over_dense": round(ratio(times, "dense", "moe"), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--uneven", action="store_true", help="let the router choose")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = conditions(
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=arguments.threads,
        rounds=arguments.rounds,
        dtype="fp32",
        routing="as routed" if arguments.uneven else "even",
        malloc={name: os.environ.get(name) for name in MALLOC},
    )
    cases = {name: measure_case(case, arguments.rounds, not arguments.uneven) for name, case in CASES.items()}
    print(json.dumps({"conditions": found, "cases": cases}, indent=2))


if __name__ == "__main__":
    main()
