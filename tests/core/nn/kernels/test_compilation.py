"""Our kernels compiled for Hopper, which needs no GPU: that they compile, and that they move 16 bytes at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")

HALF, SINGLE, ADDRESSES = "*bf16", "*fp32", "*i64"
NORM = {"x": HALF, "weight": HALF, "bias": HALF, "y": HALF, "dy": HALF, "dx": HALF}
STATISTICS = {"mean": SINGLE, "rstd": SINGLE, "dweight": SINGLE, "dbias": SINGLE, "eps": "fp32"}
ROTARY = {"q": HALF, "k": HALF, "q_out": HALF, "k_out": HALF, "cos": SINGLE, "sin": SINGLE}
SOFTMAX = {"scores": HALF, "weights": HALF, "dweights": HALF, "dscores": HALF, "mask": "*u8", "scale": "fp32"}
LOSS = {"logits": HALF, "gradient": HALF, "columns": ADDRESSES, "result": SINGLE, "lse": SINGLE, "factor": SINGLE}
LISTS = {"addresses": ADDRESSES, "sizes": ADDRESSES, "owner": "*i32", "first": ADDRESSES, "partial": SINGLE}
ADAMW = {
    **LISTS, "scale": SINGLE, "corrections": SINGLE,
    **dict.fromkeys(("lr", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "decay"), "fp32"),
}  # fmt: skip
RESIDUAL = {"x": HALF, "bias": HALF, "residual": HALF, "y": HALF, "dy": HALF, "dx": HALF, "seed": ADDRESSES}


def cases() -> Iterator[tuple[str, str, dict[str, str], dict[str, Any], int]]:
    """(module, kernel, types of arguments, constants, warps)"""
    for kernel in ("_forward", "_backward"):
        for rows, block, warps in ((1, 4096, 8), (16, 128, 4), (1, 32768, 32)):
            shape = {"ZERO_CENTERED": True, "ROWS": rows, "BLOCK": block}
            yield "rms_norm", kernel, {**NORM, **STATISTICS}, shape, warps
            yield "layer_norm", kernel, {**NORM, **STATISTICS}, shape, warps
        for name in ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "squared_relu"):
            gated = name != "squared_relu"
            yield "activation", kernel, NORM, {"NAME": name, "GATED": gated, "BIAS": True, "BLOCK": 1024}, 4
        drop = {"BIAS": True, "DROP": True, "BLOCK": 1024} if kernel == "_forward" else {"BLOCK": 1024}
        yield "residual", kernel, {**RESIDUAL, "probability": "fp32"}, drop, 4
        masked = {"MASK": False, "CAUSAL": True, "BLOCK": 4096} if kernel == "_forward" else {"BLOCK": 4096}
        yield "softmax", kernel, SOFTMAX, masked, 8
    for interleaved in (False, True):
        heads = {"Q_HEADS": 32, "K_HEADS": 8, "HALF": 64, "REST": 0}
        yield "rotary", "_rotate", ROTARY, {"INVERSE": False, "INTERLEAVED": interleaved, **heads}, 4
    for kernel in ("_statistics", "_subtract_target"):
        yield "cross_entropy", kernel, LOSS, {"BLOCK": 4096}, 8
    half, single = triton.language.bfloat16, triton.language.float32
    yield (
        "adamw", "_update", ADAMW,
        {"GRADIENT": half, "MOMENT": half, "COPY": None, "HALVES": True, "ALIGNED": True, "BLOCK": 2048}, 8,
    )  # fmt: skip
    yield (
        "adamw", "_update", ADAMW,
        {"GRADIENT": single, "MOMENT": single, "COPY": half, "HALVES": False, "ALIGNED": True, "BLOCK": 2048}, 8,
    )  # fmt: skip
    yield "adamw", "_sum_of_squares", LISTS, {"TYPE": half, "ALIGNED": True, "BLOCK": 2048}, 8


def compile_for_hopper(
    module: str, kernel: str, types: dict[str, str], constants: dict[str, Any], warps: int
) -> dict[str, Any]:
    """The assembly at each stage. Pointers and sizes are multiples of 16, as those of a model are."""
    from importlib import import_module

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(f"mt_core.nn.kernels.triton_kernels.{module}"), kernel)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*") or kind == "i32"
    }
    source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm


def test_every_kernel_compiles_and_moves_wide_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for case in cases():
        assembly = compile_for_hopper(*case)
        assert assembly["cubin"], case
        # (ld or st, elements at once, bits of one)
        words = Counter(re.findall(r"(ld|st)\.global\.(?:v(\d)\.)?b(\d+)", assembly["ptx"]))
        assert any(int(count or 1) * int(bits) == 128 for _, count, bits in words), (case, words)
        # A single number a thread is what one row or one program needs, in 32 bits and more; 16-bit accesses would
        # be data moved element by element.
        narrow = sum(n for (_, count, bits), n in words.items() if not count and int(bits) < 32)
        assert narrow <= 2, (case, words)
