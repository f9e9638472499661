"""Planned memory against the peak that torch's own allocator counts on the stub of CUDA."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.covering import EXHAUSTIVE
from tests.cuda_stub import environ, on_stub, printed_on_stub

__all__ = ["environ"]  # a fixture

pytestmark = on_stub

FOUR = "model.num_layers=4"
FULL = "recompute.recompute_granularity=full"
IN_16_BITS = "precision.accumulate_allreduce_grads_in_fp32=false"
GROUPED = "model.moe.moe_grouped_gemm=grouped"  # torch's kernels: those of Triton would be compiled, for 20 s
CASES = {
    "gradients in fp32, with logits": ("124m", "bf16", []),
    "gradients in fp32, without logits": ("1.2b", "bf16", []),
    "gradients that autograd allocates": ("8b", "bf16", [FOUR]),
    "several micro-batches": ("8b", "bf16", [FOUR, "train.global_batch_size=4"]),
    "fp32 weights": ("124m", "fp32", [FOUR]),
    "fp32 copies of gradients": ("1.2b", "bf16", [FOUR, "optimizer.main_weights=copies", IN_16_BITS]),
    "a state by parameter": ("124m", "bf16", ["optimizer.optimizer=muon"]),
    "layers computed again": ("8b", "bf16", [FOUR, FULL]),
    "groups computed again": ("8b", "bf16", [FOUR, FULL, "recompute.recompute_num_layers=2"]),
    "layers on the host": ("8b", "bf16", [FOUR, "recompute.cpu_offloading_num_layers=2"]),
    "inputs of layers on the host": ("8b", "bf16", [FOUR, FULL, "recompute.cpu_offloading_num_layers=3"]),
    "one scale a matrix": ("8b", "fp8", [FOUR]),
    "experts": ("7b-a1b", "bf16", [FOUR, GROUPED]),
    "experts computed again": ("7b-a1b", "bf16", [FOUR, GROUPED, FULL]),
    "experts in FP8": ("7b-a1b", "fp8", [FOUR, GROUPED]),
}


COUNTED_ELSEWHERE = ("several micro-batches", "fp32 weights", "groups computed again", "experts computed again")
"""What autograd keeps of these is counted on ranks in test_plan_counted.py."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in CASES if name not in COUNTED_ELSEWHERE], id="by default"),
        pytest.param(COUNTED_ELSEWHERE, id="further", marks=EXHAUSTIVE),
    ],
)
def test_a_plan_is_what_the_allocator_counts(environ: dict[str, str], names: Sequence[str]) -> None:
    """Within 1 %, without the 46 MB of cuBLAS and of batches."""
    script = Path(__file__).with_name("peak_memory.py")
    found = json.loads(printed_on_stub(environ, script, json.dumps([CASES[name] for name in names])))
    ratios = {name: planned / allocated for name, (allocated, planned) in zip(names, found, strict=True)}
    assert {name: ratio for name, ratio in ratios.items() if not 0.99 <= ratio <= 1.01} == {}
