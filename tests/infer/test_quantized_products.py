"""Products with weights as they are stored: the Triton kernel in the interpreter and compiled for Hopper, and what of a
model reaches it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.core.nn.kernels.interpreter import run_interpreted
from tests.core.train.cuda_graphs.replayed import TapeRecorder
from tests.core.train.test_steady_step import Spy
from tests.infer.engines import configuration, engine_of, logprobs_of, prompts, run, tokens_of
from tests.infer.test_families import FAMILIES
from tests.infer.test_quantization import FORMATS, GREEDY, quantized
from torch import Tensor, nn

from mt_core._torch_compat import UncompiledDispatchMode
from mt_core.nn.layout import initialize, normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_core.testing import run_ranks
from mt_core.train import build
from mt_infer.config import InferenceConfig
from mt_infer.decode_graphs import DecodeGraphs, layer_objections
from mt_infer.quantization import weights as quantized_weights
from mt_infer.quantization.groups import dequantize, quantize
from mt_infer.quantization.weights import quantize_weights
from mt_infer.sampling.parameters import SamplingParameters

pytest.importorskip("triton")
from tests.core.nn.kernels.cubin import bytes_of_stack
from tests.core.nn.kernels.test_compilation import compile_for_hopper

from mt_infer.quantization import tensor as quantized_tensor
from mt_infer.quantization.triton_product import COLUMNS, STAGES, Sizes, tiling


@dataclass(frozen=True)
class Product:
    rows: int
    width: int
    depth: int
    group: int
    dtype: torch.dtype = torch.float32
    bias: bool = False


PRODUCTS = {
    "one row, split": Product(1, 70, 512, 32, bias=True),
    "odd sizes, a shorter last group": Product(3, 33, 42, 12, torch.float16, bias=True),
    "two tiles of rows, a group longer than the row": Product(70, 65, 40, 64, torch.float16),
    "groups of several steps": Product(2, 16, 512, 256),
}


def errors_of_products(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """Relative to the largest number: of products, and of dequantized matrices."""
    from mt_infer.quantization.triton_product import triton_dequantize, triton_product

    torch.manual_seed(0)
    found = {}
    for label, case in PRODUCTS.items():
        for name in FORMATS:
            x = torch.randn(case.rows, case.depth).to(case.dtype)
            bias = torch.randn(case.width).to(case.dtype) if case.bias else None
            stored = quantize(torch.randn(case.width, case.depth), name, case.group)
            weight = dequantize(stored, name, case.group, case.depth)
            expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            product = triton_product(x, stored, case.group, bias)
            matrix = triton_dequantize(stored, case.group, case.depth, torch.float32)
            assert product.dtype == case.dtype
            found[f"{label}, {name}"] = (error(product, expected), error(matrix, weight))
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def errors_of_experts(rank: int, world: int) -> dict[str, float]:
    from mt_infer.quantization.triton_product import triton_product

    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 40, 1, 0])
    x, experts = torch.randn(44, 48), torch.arange(5).repeat_interleave(counts)
    found = {}
    for name in FORMATS:
        stored = quantize(torch.randn(5, 20, 48), name, 16)
        chosen = dequantize(stored, name, 16, 48)[experts].double()
        expected = torch.einsum("ri,roi->ro", x.double(), chosen)
        found[name] = error(triton_product(x, stored, 16, ends=counts.cumsum(0).int()), expected)
    return found


class Allocated(UncompiledDispatchMode):
    """most: bytes of the largest result of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.most = max(self.most, out.untyped_storage().nbytes())
        return out


def bytes_written(rank: int, world: int) -> dict[str, list[int]]:
    """By a layer of 96 x 64 numbers, with few rows and with many."""
    from mt_infer.quantization.tensor import MOST_ROWS

    found: dict[str, list[int]] = {}
    for name in FORMATS:
        layer = ColumnParallelLinear(64, 96, ParallelContext(), bias=True, init=normal(1.0))
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
        quantize_weights(layer, InferenceConfig(quantize_weights=name, quantize_group_size=16))
        for rows in (2, MOST_ROWS + 1):
            with torch.no_grad(), Allocated() as allocated:
                layer(torch.zeros(1, rows, 64))
            found.setdefault(name, []).append(allocated.most)
    return found


def all_interpreted(rank: int, world: int) -> tuple[Any, Any, Any]:
    return errors_of_products(rank, world), errors_of_experts(rank, world), bytes_written(rank, world)


@pytest.fixture(scope="module")
def interpreted() -> tuple[Any, Any, Any]:
    return run_interpreted(all_interpreted)[0]


@pytest.mark.slow
def test_the_kernel_multiplies_by_the_values_stored(interpreted: Any) -> None:
    products, experts, _ = interpreted
    for label, (of_product, of_matrix) in products.items():
        assert of_product < (1e-3 if "odd" in label or "tiles" in label else 3e-6), label  # fp16 or fp32
        assert of_matrix < 1e-6, label
    assert len(products) == len(PRODUCTS) * len(FORMATS)
    assert max(experts.values()) < 3e-6


def test_no_dequantized_matrix_is_written_for_few_rows(interpreted: Any) -> None:
    """The interpreter copies what is stored, a byte for each of 96 x 64 numbers. Dequantized, they are 4 bytes each."""
    for few, many in interpreted[2].values():
        assert few <= 96 * 64
        assert many >= 4 * 96 * 64


# -- what of a model reaches it -----------------------------------------------------------------------


class PlainKernel:
    """In place of the kernel, in plain torch. dequantized: shapes of matrices that something else took."""

    def __init__(self) -> None:
        self.products, self.dequantized = 0, set[tuple[int, ...]]()

    def product(
        self, x: Tensor, stored: Any, group: int, bias: Tensor | None = None, ends: Tensor | None = None
    ) -> Tensor:
        self.products += 1
        name = {torch.int8: "int8", torch.int16: "int4"}.get(stored[0].dtype, "fp8")
        weight = dequantize(stored, name, group, x.shape[1])
        if ends is None:
            return F.linear(x, weight, bias)
        experts = torch.searchsorted(ends, torch.arange(len(x)), right=True)
        return torch.einsum("ri,roi->ro", x, weight[experts])

    def dequantize(self, stored: Any, group: int, columns: int, dtype: torch.dtype) -> Tensor:
        matrix = dequantize(stored, "int4", group, columns).to(dtype)
        self.dequantized.add(tuple(matrix.shape))
        return matrix

    def install(self, patch: pytest.MonkeyPatch) -> PlainKernel:
        patch.setattr(quantized_weights, "kernel_objection", lambda *of: None)
        patch.setattr(quantized_tensor, "triton_product", self.product)
        patch.setattr(quantized_tensor, "triton_dequantize", self.dequantize)
        return self


# Attention to latents takes parts of a matrix.
CASES = {"qwen_moe": ({"quantize_output_layer": True}, set()), "deepseek": ({}, {(80, 10)})}


@pytest.mark.parametrize("family", CASES)
def test_every_product_of_a_model_reads_what_is_stored(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of linear layers, the LM head and experts; their results are those of the values that are stored."""
    options, others = CASES[family]
    config = configuration(FAMILIES[family])
    kernel = PlainKernel().install(monkeypatch)
    models = quantized(FAMILIES[family], quantize_weights="int4", **options)
    found, expected = (run(engine_of(config, model=model), prompts(9, 4), GREEDY) for model in models)
    assert [tokens_of(events) for events in found] == [tokens_of(events) for events in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=1e-5)
    assert kernel.products > 0
    assert kernel.dequantized == others


def test_a_captured_step_with_experts_waits_for_its_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop over experts reads how many rows each has; a product with what is stored does not."""
    PlainKernel().install(monkeypatch)
    model, _ = quantized(FAMILIES["qwen_moe"], quantize_weights="int8")
    engine = engine_of(configuration(FAMILIES["qwen_moe"]), model=model)
    assert list(layer_objections(engine.model, engine.options, engine.ctx)) == []
    engine.graphs = DecodeGraphs(engine.runner, engine.manager, TapeRecorder())
    for text in prompts(4, 6, 5):
        engine.add(text, SamplingParameters(temperature=0.0, max_tokens=12, ignore_eod=True))
    for _ in range(5):
        engine.step()
    with Spy() as spy:
        engine.step()
    assert spy.methods == {"tolist": spy.waits} == {"tolist": 1}


def difference_on_rank(rank: int, world: int) -> tuple[int, float]:
    """Products of sharded layers, and how far they are from those of dequantized shards."""
    config = configuration("llama", parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True})
    ctx = build.build_context(config, torch.device("cpu"))

    def sharded_layers() -> nn.Module:
        layers = nn.Sequential(
            ColumnParallelLinear(16, 32, ctx, bias=True, init=normal(0.1)),
            RowParallelLinear(32, 16, ctx, bias=True, init=normal(0.1)),
        )
        initialize(layers, 1, ctx)
        quantize_weights(layers, InferenceConfig(quantize_weights="int4", quantize_group_size=8))
        return layers

    x = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        expected = sharded_layers()(x)
        kernel = PlainKernel().install(patch)
        found = sharded_layers()(x)
    return kernel.products, float((found - expected).abs().max())


@pytest.mark.slow
@pytest.mark.dist
def test_shards_of_tensor_parallel_layers() -> None:
    for products, difference in run_ranks(2, difference_on_rank):
        assert products == 2
        assert difference < 1e-5


# -- on Hopper ----------------------------------------------------------------------------------------

PROCESSORS = 132
LLAMA_8B = {"qkv": (6144, 4096), "proj": (4096, 4096), "fc1": (28672, 4096), "fc2": (4096, 14336)}


@pytest.mark.parametrize("bits", [4, 8])
def test_few_rows_keep_every_processor_busy(bits: int) -> None:
    """Within what the parts of sums may cost: a quarter of the bytes of the weights."""
    for width, depth in LLAMA_8B.values():
        for rows in (1, 8):
            tile = tiling(Sizes(rows, width, depth // 128, 128, 1, 2, bits), PROCESSORS)
            assert -(-width // COLUMNS[bits]) * tile.row_tiles * tile.splits >= 0.9 * PROCESSORS
            assert tile.splits == 1 or tile.splits * rows * width * 8 <= width * depth * bits / 8 / 4
    assert tiling(Sizes(256, 4096, 32, 128, 1, 2, bits), PROCESSORS).splits == 1


TYPES = {"x": "*bf16", "bias": "*bf16", "scales": "*fp32", "lows": "*fp32", "ends": "*i32", "out": "*bf16"}
DECODE = {
    "GROUP": 128, "PER_WORD": 1, "BIAS": False, "EXPERTS": False, "SPLITS": 4, "ROWS": 16, "COLUMNS": 64, "DEPTH": 128,
    "bias": None, "ends": None, "lows": None, "rows": 1,
}  # fmt: skip
INT4 = {name: value for name, value in DECODE.items() if name != "lows"} | {"PER_WORD": 4, "COLUMNS": 128}
EXPERTS = {name: value for name, value in DECODE.items() if name != "ends"} | {"EXPERTS": True, "SPLITS": 1}
MANY_ROWS = {name: value for name, value in DECODE.items() if name != "rows"} | {"ROWS": 64, "SPLITS": 1}
COMPILED = {
    "int8": ("*i8", DECODE),
    "fp8, experts": ("*fp8e4nv", EXPERTS),
    "int4": ("*i16", INT4),
    "fp8, 64 rows": ("*fp8e4nv", MANY_ROWS),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_the_kernel_compiled_for_hopper(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores multiply; what is stored and inputs are copied asynchronously, 8 or 16 bytes at a time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stored, constants = COMPILED[case]
    module, types = "mt_infer.quantization.triton_product", {**TYPES, "stored": stored}
    assembly = compile_for_hopper(module, "_weight_only_product", types, constants, 4, STAGES)
    assert "wgmma.mma_async" in assembly["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, 0x(\w+),", assembly["ptx"])
    assert copies
    assert {int(size, 16) for size in copies} <= {8, 16}
    assert bytes_of_stack(assembly["cubin"], tmp_path) == 0
