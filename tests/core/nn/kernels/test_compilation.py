"""Our kernels compiled for Hopper, which needs no GPU: that they compile, and that they move 16 bytes at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

pytestmark = pytest.mark.long

triton = pytest.importorskip("triton")

from tests.core.nn.kernels.cubin import bytes_of_stack  # noqa: E402

from mt_core.nn.kernels.request import WIDEST_ROW  # noqa: E402
from mt_core.nn.kernels.triton_kernels import fp8_activations, fp8_casts, layer_norm, rms_norm, softmax  # noqa: E402
from mt_core.nn.kernels.triton_kernels.launch import (  # noqa: E402
    WIDE_BLOCK,
    WIDE_WARPS,
    warps_for,
)

HALF, SINGLE, ADDRESSES = "*bf16", "*fp32", "*i64"
NORM = {
    "x": HALF,
    "branch": HALF,
    "total": HALF,
    "dtotal": HALF,
    "weight": HALF,
    "bias": HALF,
    "y": HALF,
    "dy": HALF,
    "dx": HALF,
}
STATISTICS = {"mean": SINGLE, "rstd": SINGLE, "dweight": SINGLE, "dbias": SINGLE, "eps": "fp32"}
ROTARY_OF_QKV = {"qkv": HALF, "q": HALF, "k": HALF, "v": HALF, "cos": SINGLE, "sin": SINGLE}
NORMED_ROTARY = {
    **ROTARY_OF_QKV,
    **dict.fromkeys(("dq", "dk", "dv", "dqkv", "q_weight", "k_weight"), HALF),
    "dweights": SINGLE,
    "eps": "fp32",
    "q_scale": "fp32",
}
ROTARY = {"q": HALF, "k": HALF, "q_out": HALF, "k_out": HALF, "cos": SINGLE, "sin": SINGLE}
SOFTMAX = {"scores": HALF, "weights": HALF, "dweights": HALF, "dscores": HALF, "mask": "*u8", "scale": "fp32"}
LOSS = {"logits": HALF, "gradient": HALF, "columns": ADDRESSES, "result": SINGLE, "lse": SINGLE, "factor": SINGLE}
LOSS["width"] = "i64"  # of ids: taken as not aligned, as 50257 are not
ADAMW = {
    "addresses": ADDRESSES, "sizes": ADDRESSES, "owner": "*i32", "first": ADDRESSES,
    "scale": SINGLE, "corrections": SINGLE,
    **dict.fromkeys(("lr", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "decay"), "fp32"),
}  # fmt: skip
FP8 = {"x": HALF, "grad": HALF, "amaxes": "*i32", "parts": "*i32", "limit": "fp32", "scale": SINGLE, "noted": SINGLE}
RESIDUAL = {"x": HALF, "bias": HALF, "residual": HALF, "y": HALF, "dy": HALF, "dx": HALF, "seed": ADDRESSES}


Case = tuple[str, str, dict[str, str], dict[str, Any], int]
"""(module, kernel, types of arguments, constants, warps)"""


def cases() -> Iterator[Case]:
    yield from norm_cases()
    for way in ("forward", "backward"):
        for name in ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "squared_relu"):
            gated = name != "squared_relu"
            shape = {"NAME": name, "GATED": gated, "BIAS": True, "BLOCK": 1024}
            yield "activation", f"_activation_{way}", NORM, shape, 4
        rows = {**NORM, "weights": SINGLE, "dweights": SINGLE}
        whole = {"NAME": "swiglu", "GATED": True, "BLOCK": 1024}
        yield "activation", f"_weighted_activation_{way}", rows, whole, 4
        drop = {"BIAS": True, "DROP": True, "BLOCK": 1024} if way == "forward" else {"BLOCK": 1024}
        yield "residual", f"_bias_dropout_add_{way}", {**RESIDUAL, "probability": "fp32"}, drop, 4
    for width in (4096, 32768):
        masked = {"MASK": False, "CAUSAL": True, "BLOCK": width}
        yield "softmax", "_softmax_forward", SOFTMAX, masked, warps_for(width)
    yield "softmax", "_softmax_backward", SOFTMAX, {"BLOCK": softmax.WIDEST_BACKWARD}, 32
    yield "softmax", "_softmax_backward_by_columns", SOFTMAX, {"BLOCK": WIDE_BLOCK}, warps_for(WIDE_BLOCK)
    for interleaved in (False, True):
        heads = {"Q_HEADS": 32, "K_HEADS": 8, "HALF": 64, "REST": 0}
        yield "rotary", "_rotary", ROTARY, {"INVERSE": False, "INTERLEAVED": interleaved, **heads}, 4
        for backward in (False, True):
            whole = {"BACKWARD": backward, "INTERLEAVED": interleaved, **heads, "WIDTH": 128}
            yield "rotary_of_qkv", "_rotary_of_qkv", ROTARY_OF_QKV, whole, 4
        for way in ("forward", "backward"):
            normed = {"ZERO_CENTERED": True, "INTERLEAVED": interleaved, **heads, "Q_HEADS": 16, "WIDTH": 128}
            yield "rotary_of_qkv", f"_normed_rotary_of_qkv_{way}", NORMED_ROTARY, normed, 4
    yield "cross_entropy", "_cross_entropy_statistics", LOSS, {"DEPTH": 4, "BLOCK": 2048}, 8
    yield "cross_entropy", "_cross_entropy_gradient", LOSS, {"BLOCK": 4096}, 8
    half, single = triton.language.bfloat16, triton.language.float32
    yield (
        "adamw", "_adamw_update", ADAMW,
        {"GRADIENT": half, "MOMENT": half, "COPY": None, "HALVES": True, "ALIGNED": True, "BLOCK": 2048}, 8,
    )  # fmt: skip
    yield (
        "adamw", "_adamw_update", ADAMW,
        {"GRADIENT": single, "MOMENT": single, "COPY": half, "HALVES": False, "ALIGNED": True, "BLOCK": 2048}, 8,
    )  # fmt: skip
    yield from fp8_cases()


def fp8_cases() -> Iterator[Case]:
    yield "fp8_casts", "_fp8_amax", FP8, {"BLOCK": 8192}, 16
    yield "fp8_casts", "_fp8_note", FP8, {"NOTED": True, "BLOCK": 1024}, 4
    for form, (straight, count, measured) in (
        ("fp8e4nv", (True, 512, False)), ("fp8e5", (True, 1, True)), ("fp8e4nv", (False, 0, False)),
    ):  # fmt: skip
        shape = {"COUNT": count, "STRAIGHT": straight, "TRANSPOSED": True, "MEASURED": measured, "TILE": 128}
        yield "fp8_casts", "_fp8_cast", *fp8_case(form, shape), 8
    for turned in (False, True):
        for square in (False, True):
            yield (
                "fp8_casts",
                "_fp8_cast_blocks",
                *fp8_case("fp8e4nv", {"TURNED": turned, "SQUARE": square, "TILE": 128}),
                8,
            )
        lines, block = fp8_casts._ROW_TILES[turned]
        yield "fp8_casts", "_fp8_cast_rows", *fp8_case("fp8e4nv", {"TURNED": turned, "LINES": lines, "BLOCK": block}), 8
    for gradient in (False, True):
        yield from fp8_activation_cases({"NAME": "swiglu", "GRADIENT": gradient})


def fp8_activation_cases(kind: dict[str, Any]) -> Iterator[Case]:
    """Of the activation or of the gradient of its input."""
    module = "fp8_activations"
    yield module, "_fp8_amax_of_activation", FP8, {**kind, "BLOCK": fp8_activations._AMAX_BLOCK}, 16
    rows, columns = fp8_activations._TILE
    for count, measured in ((512, False), (1, True)):
        both = {"COUNT": count, "STRAIGHT": True, "TRANSPOSED": True, "MEASURED": measured}
        shape = {**kind, **both, "ROWS": rows, "COLUMNS": columns}
        yield module, "_fp8_cast_of_activation", *fp8_case("fp8e4nv", shape), 8
    for turned in (False, True):
        rows, columns = fp8_activations._BLOCK_TILES[turned]
        blocks = {**kind, "TURNED": turned, "ROWS": rows, "COLUMNS": columns}
        yield module, "_fp8_cast_blocks_of_activation", *fp8_case("fp8e4nv", blocks), 8
        lines, block = fp8_activations._ROW_TILES[turned]
        by_line = {**kind, "TURNED": turned, "LINES": lines, "BLOCK": block}
        yield module, "_fp8_cast_rows_of_activation", *fp8_case("fp8e4nv", by_line), 8


def fp8_case(form: str, shape: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    largest = {"fp8e4nv": 448.0, "fp8e5": 57344.0}[form]
    return {**FP8, "data": f"*{form}", "transposed": f"*{form}"}, {**shape, "LARGEST": largest, "EMULATED": False}


def norm_cases() -> Iterator[Case]:
    """Up to the widest rows that are held in registers, and those of which a block of columns is."""
    for module in (rms_norm, layer_norm):
        name, types = module.__name__.rpartition(".")[2], {**NORM, **STATISTICS}
        widest = {"forward": getattr(module, "WIDEST_FORWARD", WIDEST_ROW), "backward": module.WIDEST_BACKWARD}
        for way, width in widest.items():
            for rows, block in ((1, 4096), (16, 128), (1, width)):
                add = block <= rms_norm.WIDEST_SUM
                shape = {"ADD": add, "ZERO_CENTERED": True, "ROWS": rows, "BLOCK": block}
                yield name, f"_{name}_{way}", types, shape, warps_for(rows * block)
        adds = {"ADD": True} if module is rms_norm else {}
        by_columns = {**adds, "ZERO_CENTERED": True, "ROWS": 2, "BLOCK": WIDE_BLOCK}
        yield name, f"_{name}_backward_by_columns", types, by_columns, WIDE_WARPS
    by_columns = {"ZERO_CENTERED": True, "BLOCK": WIDE_BLOCK}
    yield "layer_norm", "_layer_norm_forward_by_columns", {**NORM, **STATISTICS}, by_columns, WIDE_WARPS


def compile_for_hopper(
    module: str, kernel: str, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int = 3
) -> dict[str, Any]:
    """The assembly at each stage. Pointers and sizes are multiples of 16, as those of a model are.

    module: of mt_core's Triton kernels, or a full name.
    """
    from importlib import import_module

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    full_name = module if "." in module else f"mt_core.nn.kernels.triton_kernels.{module}"
    function = getattr(import_module(full_name), kernel)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*") or kind == "i32"
    }
    source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def by_module() -> Iterator[Any]:
    for module, chosen in groupby(sorted(cases(), key=itemgetter(0)), itemgetter(0)):
        yield pytest.param(list(chosen), id=module)


@pytest.mark.parametrize("chosen", list(by_module()))
def test_every_kernel_compiles_and_moves_wide_words(
    chosen: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # which is no instruction
    for case in chosen:
        assembly = compile_for_hopper(*case)
        assert assembly["cubin"], case
        # (ld or st, elements at once, bits of one)
        words = Counter(re.findall(r"(ld|st)\.global\.(?:v(\d)\.)?b(\d+)", assembly["ptx"]))
        assert any(int(count or 1) * int(bits) == 128 for _, count, bits in words), (case, words)
        # A single number a thread is what one row or one program needs, in 32 bits and more; 16-bit accesses would
        # be data moved element by element.
        narrow = sum(n for (_, count, bits), n in words.items() if not count and int(bits) < 32)
        assert narrow <= 2, (case, words)
        assert bytes_of_stack(assembly["cubin"], tmp_path) == 0, case


def test_copies_and_remainders_are_updated_by_the_same_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fp32 numbers, in the same order: the two forms of master weights train the same bits."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    half, single = triton.language.bfloat16, triton.language.float32
    common = {"GRADIENT": single, "MOMENT": single, "ALIGNED": True, "BLOCK": 2048}
    copies, halves = (
        re.findall(r"\b(?:add|sub|mul|fma|div|sqrt|neg)\.[\w.]*f32\b", compile_for_hopper(*case)["ptx"])
        for case in (
            ("adamw", "_adamw_update", ADAMW, {**common, "COPY": half, "HALVES": False}, 8),
            ("adamw", "_adamw_update", ADAMW, {**common, "COPY": None, "HALVES": True}, 8),
        )
    )
    assert copies
    assert copies == halves


def test_no_two_kernels_have_one_name() -> None:
    """Profilers sum times by name."""
    # As installed: a GPU machine has wheels of mt, and no `packages`.
    packages = [m for m in iter_modules() if m.ispkg and m.name.startswith("mt_")]
    sources = [file for m in packages for file in Path(m.module_finder.path, m.name).rglob("*.py")]
    defined = Counter(name for file in sources for name in re.findall(r"@triton\.jit\ndef (\w+)", file.read_text()))
    assert {"_rms_norm_forward", "_grouped_gemm"} <= defined.keys()
    assert {name for name, count in defined.items() if count > 1} == set()


class Hopper:
    """A driver without a GPU, for what torch.compile looks up while it traces."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda *given, **named: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())


@pytest.mark.usefixtures("hopper")
def test_torch_compile_traces_norms_of_several_widths() -> None:
    """Of models that one process trains: their layers share code, and torch.compile makes symbols of sizes that
    differ."""
    import torch
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    class Norms(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.bias = (torch.nn.Parameter(torch.ones(width, device="meta")) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, normed = rms_norm.add_rms_norm(x, None, self.weight, 1e-5)
            return x + layer_norm.layer_norm(normed, self.weight, self.bias, 1e-5)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward))
    for width, rows in ((32, 4), (64, 6), (48, 8)):
        out = torch.compile(Norms(width), backend=backend, fullgraph=True)(torch.ones(rows, width, device="meta"))
        out.sum().backward()
        assert out.shape == (rows, width)


@pytest.mark.usefixtures("hopper")
def test_torch_compile_traces_a_layers_kernels_into_one_graph_each_way() -> None:
    """On the meta device, without generating code."""
    import torch
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    from mt_core.nn.kernels.triton_kernels.activation import activation
    from mt_core.nn.kernels.triton_kernels.rotary import rotary

    kernels: list[int] = []

    def record(graph: Any, inputs: object) -> Any:
        kernels.append(sum("triton_kernel" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def block(x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x, normed = rms_norm.add_rms_norm(x, branch, weight, 1e-5)
        x, normed = layer_norm.add_layer_norm(x, normed, weight, bias, 1e-5)
        q, k = rotary(normed.unflatten(-1, (2, 16)), branch.unflatten(-1, (2, 16)), cos, sin)
        return x + torch.cat([activation((q * k).flatten(2), None, "swiglu")] * 2, -1)

    cos, sin = torch.randn(2, 1, 4, 1, 8, device="meta")
    shapes = ((2, 4, 32), (2, 4, 32), (32,), (32,))
    given = [torch.randn(*shape, device="meta", requires_grad=True) for shape in shapes]
    torch.compiler.reset()
    compiled = torch.compile(block, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    compiled(*given).sum().backward()
    assert kernels == [4, 4]
