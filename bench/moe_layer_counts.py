"""Launches and activation memory of an MoE layer with the kernels of a Hopper GPU, bf16, on the meta device.

    uv run python bench/moe_layer_counts.py [--verbose]

The layer of Qwen3-30B-A3B (128 experts of 2048 x 768, top-8), 4096 tokens, one rank. Operators that write something
count as one launch, Triton kernels too; a sort is several kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "layers"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from counting import Launches, count
from tests.moe.fake_gpu import act_as_a_gpu

from mt_core.config.loading import load_config
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.kernels.choice import Kernels, use_kernels
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 4096, 2048, 768, 128, 8
PRODUCTS: dict[str, list[str]] = {"default": [], "grouped": ["model.moe.moe_grouped_gemm=grouped"]}


class HopperEnvironment(ModelBuildContext):
    @property
    def planned_capability(self) -> tuple[int, int]:
        return (9, 0)


def counts(launches: Launches, product: str) -> dict[str, Any]:
    settings = [
        f"model.hidden_size={HIDDEN}",
        "train.train_iters=1",
        "precision.dtype=bf16",
        f"model.moe.num_experts={EXPERTS}",
        f"model.moe.moe_router_topk={TOPK}",
        f"model.moe.moe_ffn_hidden_size={FFN}",
        "model.moe.moe_permute_fusion=true",
        *PRODUCTS[product],
    ]
    host = load_plugins()
    config = load_config(preset="llama3.2-1b", overrides=settings, host=host).config
    kernels = Kernels({}, "cuda", "bfloat16")
    ctx = ParallelContext(device=torch.device("meta"), params_dtype=torch.bfloat16)
    layer = HopperEnvironment(config, ctx, host).feed_forward("moe", config.model, 0)
    use_kernels(layer.modules(), kernels)
    x = torch.empty((1, TOKENS, HIDDEN), dtype=torch.bfloat16, device="meta", requires_grad=True)
    return count(launches, layer, layer, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="Launches by name.")
    verbose = parser.parse_args().verbose
    launches = Launches()
    act_as_a_gpu(setattr, launches.names)
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
