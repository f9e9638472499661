"""On a GPU: products with weights as they are stored, against dequantized ones, captured as graphs, and in a model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.config.loading import load_config
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train import build
from mt_infer.config import InferenceConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
mt_infer = pytest.importorskip("mt_infer")

FORMATS = ("int8", "fp8", "int4")
MODEL = [
    "train.train_iters=1", "precision.dtype=bf16", "inference.cache_memory_gb=1", "inference.max_requests=6",
    "model.family=llama", "model.num_layers=2", "model.hidden_size=512", "model.num_attention_heads=8",
    "model.vocab_size=1024",
]  # fmt: skip
MOE = "model.moe={num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256}"


def quantized(name: str, *shape: int, group: int = 128) -> tuple[tuple[Tensor, ...], Tensor]:
    """What is stored, and the values in fp32."""
    from mt_infer.quantization.groups import dequantize, quantize

    stored = quantize(torch.randn(*shape, device="cuda"), name, group)
    return stored, dequantize(stored, name, group, shape[-1])


def assert_near(found: Tensor, expected: Tensor) -> None:
    """The result was rounded to bf16."""
    assert float((found.float() - expected).abs().max() / expected.abs().max()) < 8e-3


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_dequantized_weights(name: str) -> None:
    from mt_infer.quantization.triton_product import triton_dequantize, triton_product

    torch.manual_seed(0)
    for rows, width, depth, group in (
        (1, 4096, 4096, 128),
        (8, 1000, 4096, 32),
        (33, 512, 1056, 96),
        (256, 768, 512, 512),
    ):
        stored, weight = quantized(name, width, depth, group=group)
        x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(width, device="cuda", dtype=torch.bfloat16)
        assert_near(triton_product(x, stored, group, bias), F.linear(x.float(), weight, bias.float()))
        assert_near(triton_dequantize(stored, group, depth, torch.bfloat16), weight)


@pytest.mark.parametrize("name", FORMATS)
def test_a_captured_product_follows_its_inputs_and_the_rows_of_experts(name: str) -> None:
    from mt_infer.quantization.triton_product import triton_product

    torch.manual_seed(0)
    stored, weight = quantized(name, 8, 256, 512)
    dense, matrix = quantized(name, 1024, 2048)
    x, wide = (torch.randn(12, size, device="cuda", dtype=torch.bfloat16) for size in (512, 2048))
    counts = torch.tensor([3, 0, 5, 0, 0, 4, 0, 0], device="cuda")
    ends = counts.cumsum(0).int()

    def products() -> tuple[Tensor, Tensor]:
        return triton_product(x, stored, 128, ends=ends), triton_product(wide, dense, 128)

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_expert, plain = products()
    for changed in (counts, counts.flip(0)):
        ends.copy_(changed.cumsum(0))
        x.normal_()
        wide.normal_()
        graph.replay()
        experts = torch.arange(8, device="cuda").repeat_interleave(changed)
        assert_near(by_expert, torch.einsum("ri,roi->ro", x.float(), weight[experts]))
        assert_near(plain, F.linear(wide.float(), matrix))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("feed_forward", ["dense", "experts"])
def test_decoding_in_graphs_gives_the_first_tokens_of_dequantized_weights(name: str, feed_forward: str) -> None:
    """bf16 products round differently, so that later tokens of random weights may part."""
    from mt_infer.quantization.weights import QuantizedWeight, product_of, quantize_weights

    keys = [*MODEL, f"inference.quantize_weights={name}", *([MOE] if feed_forward == "experts" else [])]
    keys += ["model.family=mixtral"] if feed_forward == "experts" else []
    host = load_plugins()
    config = load_config(overrides=keys, host=host).config
    ctx = build.build_context(config, torch.device("cuda"))
    found = []
    for uses_kernel in (True, False):
        torch.manual_seed(0)
        model = build.build_initialized_model(config, ctx, host).eval()
        quantize_weights(model, config.section(InferenceConfig))
        assert product_of(model) == "Triton weight-only kernel on CUDA"
        if not uses_kernel:
            for module in model.modules():
                if isinstance(module, QuantizedWeight):
                    module.uses_kernel = False
                if hasattr(getattr(module, "product", None), "dense"):
                    module.product = module.product.dense
        found.append(first_tokens(model, config))
    assert sum(own == other for own, other in zip(*found, strict=True)) >= 5


def first_tokens(model: torch.nn.Module, config) -> list[list[int]]:
    options = config.section(InferenceConfig).model_copy(update={"cuda_graphs": "decode"})
    engine = mt_infer.InferenceEngine(model, None, ParallelContext(device=torch.device("cuda")), options, longest=128)
    greedy = mt_infer.SamplingParameters(temperature=0.0, max_tokens=3, ignore_eod=True)
    found: dict[int, list[int]] = {
        engine.add([7 * number + place for place in range(10 + 8 * number)], greedy): [] for number in range(6)
    }
    while not engine.is_idle:
        for event in engine.step():
            found[event.request].append(event.token)
    return list(found.values())
