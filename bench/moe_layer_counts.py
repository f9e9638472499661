"""Launches and activation memory of an MoE layer with the kernels that a GPU gets, bf16, on the meta device.

    uv run python bench/moe_layer_counts.py [--verbose]

The layer of Qwen3-30B-A3B (128 experts of 2048 x 768, top-8), 4096 tokens, one rank. Operators that write something
count as one launch, Triton kernels too; a sort is several kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "layers"))
from counting import Launches, count

from mt_core.config.loading import load_config
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.use import use_kernels
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_moe.experts.groups import GroupedProduct

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 4096, 2048, 768, 128, 8
PRODUCTS = ("grouped", "triton")


def act_as_a_gpu(launches: Launches) -> None:
    """Triton's launches are counted and not done, and nothing looks for a GPU."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    from mt_moe import layer
    from mt_moe.experts import choose, experts
    from mt_moe.kernels import tma
    from mt_moe.kernels.rows import TRITON_ROWS

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.names[self.fn.__name__] += 1

    def run_timed(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.names[self.base_fn.__name__] += 1

    JITFunction.run, Autotuner.run = run, run_timed
    layer.row_kernels = lambda config, ctx: TRITON_ROWS
    experts.load_product = partial(gpu_product, choose.load_product)
    tma.has_tma = lambda x: True


def gpu_product(load: Callable[[Any], GroupedProduct], name: Any, device_type: str) -> GroupedProduct:
    """What a GPU gets, on the meta device."""
    return load(name)


def counts(launches: Launches, product: str) -> dict[str, Any]:
    settings = [
        f"model.hidden_size={HIDDEN}",
        "train.train_iters=1",
        "precision.dtype=bf16",
        f"model.moe.num_experts={EXPERTS}",
        f"model.moe.moe_router_topk={TOPK}",
        f"model.moe.moe_ffn_hidden_size={FFN}",
        "model.moe.moe_permute_fusion=true",
        f"model.moe.moe_grouped_gemm={product}",
    ]
    host = load_plugins()
    config = load_config(preset="llama3.2-1b", overrides=settings, host=host).config
    kernels = Kernels({}, "cuda", "bfloat16")
    ctx = ParallelContext(device=torch.device("meta"), params_dtype=torch.bfloat16)
    layer = ModelEnvironment(config, ctx, host).feed_forward("moe", config.model, 0)
    use_kernels(layer.modules(), kernels)
    x = torch.empty((1, TOKENS, HIDDEN), dtype=torch.bfloat16, device="meta", requires_grad=True)
    return count(launches, layer, layer, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="Launches by name.")
    verbose = parser.parse_args().verbose
    launches = Launches()
    act_as_a_gpu(launches)
    for name in PRODUCTS:
        found = counts(launches, name)
        forward, backward = (Counter(found[key]) for key in ("forward", "backward"))
        print(
            f"{name}: {forward.total()} launches forward, {backward.total()} backward, {found['bytes'] >> 20} MiB saved"
        )
        for key in ("forward", "backward") if verbose else ():
            print(f"    {key}: {dict(Counter(found[key]).most_common())}")


if __name__ == "__main__":
    main()
