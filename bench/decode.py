"""Decoding on a GPU: milliseconds a step by batch size, beside the time in which the memory can be read.

    python bench/decode.py --model 8b --batch 1 --batch 8 --out decode-8b.json

Random weights and prompts. The floor counts the bytes that a step has to read once, at the bandwidth of a copy in the
same process: all weights, as they are stored, but the token embeddings (of experts those that are expected to be
chosen), and the keys and values of the sequences. `--weights plain --weights int8` measures quantized weights beside
plain ones. Without a GPU the models are tiny and the times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from mt_core.config.loading import load_config
from mt_core.config.schema import Config
from mt_core.nn.embedding import VocabParallelEmbedding
from mt_core.nn.layout import LayoutModule
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train import build
from mt_infer import InferenceEngine, SamplingParameters
from mt_infer.config import InferenceConfig
from mt_infer.quantization.weights import product_of, quantize_weights
from mt_moe.experts.experts import ExpertLinear
from mt_tools.bench.machine import Machine, measure_machine
from mt_tools.bench.report import Case, Report, conditions

WARM_UP = 8
PLAIN = "plain"
TINY = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.ffn_hidden_size=96",
    "model.vocab_size=256", "model.make_vocab_size_divisible_by=1",
)  # fmt: skip
SMALL_LLAMA = (*TINY, "model.num_query_groups=2")
SMALL_LATENT = (
    *TINY, "model.kv_lora_rank=16", "model.qk_head_dim=16", "model.qk_pos_emb_head_dim=8", "model.v_head_dim=16",
    "model.moe.moe_layer_freq=([0]*1+[1]*1)", "model.moe.num_experts=8", "model.moe.moe_ffn_hidden_size=32",
    "model.moe.moe_shared_expert_intermediate_size=32",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """goals: milliseconds a step by batch size. small: settings in place of the preset's sizes without a GPU."""

    preset: str
    settings: tuple[str, ...]
    goals: dict[int, float]
    small: tuple[str, ...]


SHAPE_583M = (
    "model.num_layers=24", "model.hidden_size=1280", "model.num_attention_heads=10", "model.num_query_groups=10",
    "model.ffn_hidden_size=3264", "model.vocab_size=50304", "model.untie_embeddings_and_output_weights=true",
)  # fmt: skip
MODELS = {
    "8b": Model("llama3.1-8b", (), {1: 4.5, 8: 4.9}, SMALL_LLAMA),
    "583m": Model("llama3.2-1b", SHAPE_583M, {1: 0.6}, SMALL_LLAMA),
    "16b-moe": Model("deepseek-v2-lite", (), {1: 3.0}, SMALL_LATENT),
}


def configuration(model: Model, weights: str, machine: Machine, more: Sequence[str], host: PluginHost) -> Config:
    sizes = model.settings if machine.is_gpu else model.small
    dtype, memory = ("bf16", 8) if machine.is_gpu else ("fp32", 0.2)
    common = (f"precision.dtype={dtype}", f"inference.cache_memory_gb={memory}", "inference.max_requests=8")
    form = () if weights == PLAIN else (f"inference.quantize_weights={weights}",)
    settings = [*common, "train.train_iters=1", *sizes, *form, *more]
    return load_config(preset=model.preset, overrides=settings, host=host).config


def build_engine(config: Config, machine: Machine, host: PluginHost, longest: int) -> InferenceEngine:
    ctx = build.build_context(config, machine.device)
    model = build.build_model(config, ctx, host).eval()
    # Random values: of what a step does, only the routing of experts depends on them.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    quantize_weights(model, config.section(InferenceConfig))
    return InferenceEngine(model, None, ctx, config.section(InferenceConfig), longest=longest)


def bytes_of_step(engine: InferenceEngine, batch: int, context: int) -> float:
    """That a step over `batch` sequences of `context` positions has to read."""
    cached = sum(group.bytes_per_position for group in engine.manager.layout.groups)
    return weight_bytes(engine.model, batch) + batch * (context * cached + engine.manager.layout.bytes_per_sequence)


def weight_bytes(model: nn.Module, batch: int) -> float:
    # By the name of the router, whose layer's experts have the same prefix.
    topk = {name: module.config.moe_router_topk for name, module in model.named_modules() if name.endswith(".router")}
    embedding = next(module for module in model.modules() if isinstance(module, VocabParallelEmbedding))
    is_tied = not any(name.startswith("output_layer") for name, _ in model.named_parameters())
    total = 0.0
    for name, module in model.named_modules():
        own = 0.0 if isinstance(module, ParametrizationList) else own_bytes(module)
        if isinstance(module, ExpertLinear):
            count = module.layouts["weight"].shape[0]
            chosen = next(k for router, k in topk.items() if name.startswith(router.removesuffix("router")))
            # The expected share of experts that one token of the batch at least chooses, if choices are independent.
            own *= 1 - (1 - chosen / count) ** batch
        # A step reads one row for each sequence of it. A tied one is read whole, as the LM head.
        if module is embedding and not is_tied:
            own = 0.0
        total += own
    return total


def own_bytes(module: nn.Module) -> float:
    """Of a module's parameters, also where they are quantized."""
    parameters = module.named_parameters()
    return float(sum(one.nbytes for name, one in parameters if "." not in name or name.startswith("parametrizations.")))


def parameter_count(model: nn.Module) -> int:
    layouts = (module.layouts for module in model.modules() if isinstance(module, LayoutModule))
    return sum(math.prod(layout.shape) for own in layouts for layout in own.values())


def timed_steps(engine: InferenceEngine, batch: int, context: int, steps: int) -> list[float]:
    """Seconds of steps that decode, until their tokens are on the host."""
    vocab = engine.runner.model.config.vocab_size  # type: ignore[attr-defined]
    sampling = SamplingParameters(temperature=0.8, top_p=0.95, max_tokens=steps + WARM_UP + 1, ignore_eod=True, seed=0)
    for number in range(batch):
        generator = torch.Generator().manual_seed(number)
        engine.add(torch.randint(0, vocab, (context,), generator=generator).tolist(), sampling)
    # Prompts are computed first: the steps that are timed decode alone.
    while any(sequence.num_uncomputed_tokens > 1 for sequence in engine.scheduler.sequences()):
        engine.step()
    seconds = []
    for _ in range(steps + WARM_UP):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    while not engine.is_idle:
        engine.step()
    # The next batch has the same prompts, and would find them in the cache.
    engine.manager.forget_prefixes()
    return seconds[WARM_UP:]


@torch.inference_mode()  # as the engine's steps, whose inputs a replay fills
def replay_seconds(engine: InferenceEngine, steps: int) -> float | None:
    """Of the last captured graph alone, without the host between two replays."""
    graph = None if engine.graphs is None else engine.graphs.last
    if graph is None:
        return None
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        # Rows of filler only: the kernels and the bytes of weights are the same; those of the sequences are not read.
        graph.replay([])
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def case_of(
    name: str, weights: str, engine: InferenceEngine, machine: Machine, batch: int, context: int, steps: int
) -> Case:
    median = statistics.median(timed_steps(engine, batch, context, steps))
    floor = bytes_of_step(engine, batch, context + steps // 2) / machine.copy_bandwidth
    replay = replay_seconds(engine, steps)
    return {
        "name": f"{name} batch {batch}" if weights == PLAIN else f"{name} {weights} batch {batch}",
        "parameters": parameter_count(engine.model),
        "products": product_of(engine.model) or "dense",
        "context": context,
        "step_ms": median * 1e3,
        "tokens_per_second": batch / median,
        "floor_ms": floor * 1e3,
        "of_copy_bandwidth": floor / median,
        "cuda_graphs": engine.graphs is not None,
        "replay_ms": None if replay is None else replay * 1e3,
        "goal_ms": MODELS[name].goals.get(batch) if machine.is_gpu and weights == PLAIN else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--weights", action="append", choices=[PLAIN, "int8", "fp8", "int4"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    host, machine = load_plugins(), measure_machine(10)
    report = Report("decode", conditions(**machine.conditions()), options.out, on_case=lambda case: print(case))
    print(report.conditions)
    context, steps = (options.context, options.steps) if machine.is_gpu else (24, 10)
    for name, weights in product(options.model or MODELS, options.weights or [PLAIN]):
        config = configuration(MODELS[name], weights, machine, options.set, host)
        engine = build_engine(config, machine, host, context + 2 * steps + 2 * WARM_UP)
        for batch in options.batch or (1, 8):
            report.add(case_of(name, weights, engine, machine, batch, context, steps))
        del engine
        gc.collect()
        if machine.is_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
