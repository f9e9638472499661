"""On a GPU: decode steps as CUDA graphs against steps without, and their kernels against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mt_core.config.loading import load_config
from mt_core.nn.cache import PagedScores
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train import build
from mt_infer.config import InferenceConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
mt_infer = pytest.importorskip("mt_infer")

SHAPE = [
    "train.train_iters=1", "precision.dtype=bf16", "inference.cache_memory_gb=1", "inference.max_requests=6",
    "model.hidden_size=256", "model.vocab_size=1024",
]  # fmt: skip
MODELS = {
    "llama": ["model.family=llama", "model.num_layers=2", "model.num_attention_heads=8", "model.num_query_groups=2"],
    "deepseek": ["model.family=deepseek", "model.num_layers=2", "model.num_attention_heads=8", "model.kv_lora_rank=64",
                 "model.moe={num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128}"],
    "deepseek_v32": ["model.family=deepseek_v32", "model.num_layers=2", "model.num_attention_heads=8",
                     "model.kv_lora_rank=64", "model.q_lora_rank=64", "model.dsa_indexer_topk=32",
                     "model.dsa_indexer_n_heads=8", "model.dsa_indexer_head_dim=64", "model.qk_pos_emb_head_dim=32",
                     "model.moe={num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128}"],
    "deepseek_v4": ["model.family=deepseek_v4", "model.num_layers=4", "model.num_attention_heads=8",
                    "model.kv_channels=64", "model.qk_pos_emb_head_dim=32", "model.q_lora_rank=64",
                    "model.o_groups=4", "model.o_lora_rank=32", "model.sliding_window=16",
                    "model.compress_ratios=[0,4,16,4]", "model.indexed_compress_ratio=4",
                    "model.dsa_indexer_topk=8", "model.dsa_indexer_n_heads=8", "model.dsa_indexer_head_dim=64",
                    "model.hyper_connection_streams=2",
                    "model.moe={num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128}"],
    "hybrid": ["model.family=hybrid", "model.num_attention_heads=4", "model.hybrid_layer_pattern=M*"],
}  # fmt: skip


def tokens_and_graphs(model: torch.nn.Module, config, graphs: str) -> tuple[dict[int, list[int]], int]:
    options = config.section(InferenceConfig).model_copy(update={"cuda_graphs": graphs})
    engine = mt_infer.InferenceEngine(model, None, ParallelContext(device=torch.device("cuda")), options, longest=256)
    greedy = mt_infer.SamplingParameters(temperature=0.0, max_tokens=24, ignore_eod=True)
    found: dict[int, list[int]] = {
        engine.add([7 * number + place for place in range(10 + 20 * number)], greedy): [] for number in range(6)
    }
    while not engine.is_idle:
        for event in engine.step():
            found[event.request].append(event.token)
    return found, 0 if engine.graphs is None else len(engine.graphs.captured)


@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_the_same_first_tokens(name: str) -> None:
    """bf16 kernels round differently, so that later tokens of random weights may part."""
    host = load_plugins()
    config = load_config(overrides=[*SHAPE, *MODELS[name]], host=host).config
    ctx = build.build_context(config, torch.device("cuda"))
    torch.manual_seed(0)
    model = build.build_initialized_model(config, ctx, host).eval()
    (plain, none), (graphed, some) = (tokens_and_graphs(model, config, graphs) for graphs in ("none", "decode"))
    assert (none, some > 0) == (0, True)
    same = [own[:4] == other[:4] for own, other in zip(graphed.values(), plain.values(), strict=True)]
    assert sum(same) >= 5


@pytest.mark.parametrize("second", [0, 64])
def test_paged_attention_is_plain_torchs(second: int) -> None:
    from mt_infer.cache.paged_attention import PageTable, plain_paged_attention
    from mt_infer.cache.triton_attention import triton_paged_attention

    rows, heads, groups, width = 3, 16, 1 if second else 4, 512 if second else 128
    blocks = torch.randperm(3 * 64, device="cuda").view(rows, 64).int()
    table = PageTable(blocks, torch.tensor([0, 1000, 500], device="cuda"), 16)
    dims = (width, second) if second else (width,)
    queries = tuple(torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16) for dim in dims)
    keys = tuple(torch.randn(3 * 64 * 16, groups, dim, device="cuda", dtype=torch.bfloat16) for dim in dims)
    values = keys[0] if second else torch.randn_like(keys[0])
    for scores in (PagedScores(0.05), PagedScores(0.05, window=100, softcap=5.0)):
        case = queries, keys, values
        expected = plain_paged_attention(
            *(tuple(x.float() for x in part) for part in case[:2]), values.float(), table, scores
        )
        torch.testing.assert_close(triton_paged_attention(*case, table, scores).float(), expected, atol=2e-2, rtol=2e-2)


def test_the_fused_sampler_draws_plain_torchs_tokens_without_waiting() -> None:
    from mt_infer.blocks import PrefixKeys
    from mt_infer.requests import Request, RunningSequence
    from mt_infer.sampling.rows import SamplingRow
    from mt_infer.sampling.sampler import choose
    from mt_infer.sampling.triton_sampler import triton_sample

    asked = mt_infer.SamplingParameters(top_p=0.9, top_k=500, min_p=0.001)
    rows = [
        SamplingRow(RunningSequence(Request(0, (1,), asked), 0, seed, 9, [], PrefixKeys(b"", 4), [1]))
        for seed in range(64)
    ]
    greedy = Request(0, (1,), replace(asked, temperature=0.0))
    rows += [SamplingRow(replace(row.sequence, request=greedy)) for row in rows]
    logits = 3 * torch.randn(len(rows), 128_256, device="cuda")
    triton_sample(logits, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = triton_sample(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same = [own == other for own, other in zip(found.tolist(), choose(logits.cpu(), rows).tolist(), strict=True)]
    assert sum(same) >= len(rows) - 1  # sums are rounded in another order
