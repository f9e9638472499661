"""What explicit collectives add to a tensor-parallel block, and a data-parallel step beside torch's DDP.

    uv run python bench/tensor_parallel.py [--rounds 40] [--parts block data]

1. Block: a column- and a row-parallel linear, forward and backward on two ranks, against the bare matrix products
   (six of them) and the bare all-reduces (two) on tensors of the same shapes, with nothing around them. Our block may
   run the backward all-reduce while a product is computed; the bare ones run one after the other.
2. Step: forward, backward, reduction of gradients and AdamW of a stack of linear layers on two ranks: our buckets, our
   distributed optimizer, torch's DistributedDataParallel with fused AdamW.

Candidates take turns within a round, each in another place in each round; printed is the median over rounds of the
ratios within a round, so that what slows the machine slows both sides.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.layout import LayoutModule, ParameterLayout, initialize, normal, parameter_layouts
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.optim.optimizers import AdamW
from mt_core.optim.param_and_grad_buffer import BufferOptions, ParamAndGradBuffer
from mt_core.optim.param_groups import param_groups
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.testing import run_ranks
from mt_tools.bench.report import as_line, conditions

RANKS, WARM_UP = 2, 3
BLOCK = {"tokens": 512, "hidden": 512, "ffn": 2048}
STACK = {"layers": 6, "width": 768}
BATCH = 256
Work = Callable[[], object]


def interleaved(works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of each work in each round, on the slower rank."""
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + WARM_UP):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            # Both ranks begin together; a work's time is that of the slower one.
            dist.barrier()
            started = time.perf_counter()
            works[name]()
            taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if number >= WARM_UP:
                seconds[name].append(taken.item())
    return seconds


# -- a block --------------------------------------------------------------------------------------


def parallel_block(ctx: ParallelContext, tokens: int, hidden: int, ffn: int) -> Work:
    """x -> gelu(x A^T) B^T without the gelu: nothing but products and communication."""
    up = ColumnParallelLinear(hidden, ffn, ctx, bias=False, init=normal(0.02))
    down = RowParallelLinear(ffn, hidden, ctx, bias=False, init=normal(0.02))
    initialize(nn.ModuleList([up, down]), 0, ctx)
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    grad = torch.randn_like(x)

    def work() -> None:
        for tensor in (x, up.weight, down.weight):
            tensor.grad = None
        down(up(x)).backward(grad)

    return work


def bare_block(ctx: ParallelContext, tokens: int, hidden: int, ffn: int) -> Work:
    """The same products and all-reduces, called one after the other."""
    share = ffn // ctx.tp.size

    def random(*shape: int) -> Tensor:
        return torch.randn(shape)

    x, up, down, grad = random(tokens, hidden), random(share, hidden), random(hidden, share), random(tokens, hidden)

    @torch.no_grad()
    def work() -> tuple[Tensor, Tensor]:
        inner = F.linear(x, up)
        out = F.linear(inner, down)
        dist.all_reduce(out, group=ctx.tp.group)
        d_inner = grad @ down
        d_down = grad.T @ inner
        d_x = d_inner @ up
        dist.all_reduce(d_x, group=ctx.tp.group)
        d_up = d_inner.T @ x
        return d_down, d_up

    return work


def measure_block(rank: int, world: int, rounds: int) -> dict[str, list[float]]:
    ctx = build_parallel_context(AxisSizes(tp=world))
    return interleaved({"block": parallel_block(ctx, **BLOCK), "bare": bare_block(ctx, **BLOCK)}, rounds)


# -- a step ---------------------------------------------------------------------------------------


class Layer(LayoutModule):
    weight: Tensor

    def __init__(self, width: int, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.declare("weight", ParameterLayout((width, width), normal(0.02)))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight)


def stack(layers: int, width: int, ctx: ParallelContext) -> nn.Module:
    model = nn.Sequential(*(Layer(width, ctx) for _ in range(layers)))
    initialize(model, 0, ctx)
    return model


def buffered_step(ctx: ParallelContext, batch: Tensor, layers: int, width: int, *, sharded: bool) -> Work:
    model = stack(layers, width, ctx)
    weights = ParamAndGradBuffer(model, ctx, BufferOptions(sharded=sharded, bucket_elements=2 * width * width))
    shapes = {name: layout.shape for name, layout in parameter_layouts(model).items()}
    optimizer = AdamW(param_groups(weights.named_parameters(), 0.01, shapes), 1e-4, 0.9, 0.95, 1e-8)

    def work() -> None:
        weights.zero_grad()
        weights.expect(1)
        (model(batch).square().mean() / ctx.dp.size).backward()
        weights.reduce()
        optimizer.step()
        weights.copy_to_model()

    return work


def torch_step(ctx: ParallelContext, batch: Tensor, layers: int, width: int) -> Work:
    bucket_mib = 2 * width * width * batch.element_size() / 2**20
    model = nn.parallel.DistributedDataParallel(
        stack(layers, width, ctx), bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def work() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return work


def measure_step(rank: int, world: int, rounds: int) -> dict[str, list[float]]:
    ctx = build_parallel_context(AxisSizes())
    batch = torch.randn(BATCH, STACK["width"])
    works = {
        "buckets": buffered_step(ctx, batch, **STACK, sharded=False),
        "distributed optimizer": buffered_step(ctx, batch, **STACK, sharded=True),
        "DDP": torch_step(ctx, batch, **STACK),
    }
    return interleaved(works, rounds)


# -- printing -------------------------------------------------------------------------------------


def ratio(seconds: Mapping[str, Sequence[float]], mine: str, theirs: str) -> str:
    """Median and quartiles of the ratios of rounds."""
    low, middle, high = statistics.quantiles((a / b for a, b in zip(seconds[mine], seconds[theirs], strict=True)), n=4)
    milliseconds = [statistics.median(seconds[name]) * 1e3 for name in (mine, theirs)]
    return (
        f"{mine} / {theirs}: {middle:.3f} (quartiles {low:.3f} to {high:.3f}; "
        f"medians {milliseconds[0]:.2f} and {milliseconds[1]:.2f} ms)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--parts", nargs="+", choices=("block", "data"), default=["block", "data"])
    arguments = parser.parse_args()
    rounds = arguments.rounds
    print(as_line(conditions(torch=torch.__version__, ranks=f"{RANKS} of one thread, gloo, fp32", rounds=rounds)))
    if "block" in arguments.parts:
        seconds = run_ranks(RANKS, measure_block, rounds, timeout=600.0)[0]
        print(f"tensor-parallel block {BLOCK}\n  {ratio(seconds, 'block', 'bare')}")
    if "data" in arguments.parts:
        seconds = run_ranks(RANKS, measure_step, rounds, timeout=600.0)[0]
        print(f"data-parallel step {STACK}, {BATCH} rows a rank")
        for name in ("buckets", "distributed optimizer"):
            print(f"  {ratio(seconds, name, 'DDP')}")


if __name__ == "__main__":
    main()
