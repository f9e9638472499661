"""Quantized weights and caches against their formulas in plain torch, in layouts, and by the perplexity of a text."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.ckpt.convert_cases import MODELS
from tests.dist.in_turn import InTurn
from tests.infer.engines import configuration, engine_of, logprobs_of, new_model, prompts, randomize, run, tokens_of
from tests.infer.test_families import FAMILIES
from torch import Tensor, nn

from mt_cli.main import run as mt
from mt_core._torch_compat import int8_product
from mt_core.errors import ConfigError
from mt_core.nn.layout import initialize
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import build
from mt_infer.cache.layout import cache_layout
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.lockstep import LockstepEngine
from mt_infer.quantization.groups import dequantize, quantize, quantize_int8
from mt_infer.quantization.int8_product import Int8Matrix
from mt_infer.quantization.weights import (
    QuantizedWeight,
    matrices,
    quantize_weights,
    tied_tables,
    weight_bytes,
)
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator
from mt_tools.bench.timing import elapsed

GREEDY = SamplingParameters(temperature=0.0, max_tokens=5, logprobs=1, prompt_logprobs=0)
FORMATS = ("int8", "int4", "fp8")


def by_formula(row: list[float], name: str) -> list[float]:
    """One group, number by number."""
    if name == "int4":
        low, step = min(row), (max(row) - min(row)) / 15 or 1.0
        return [low + round((x - low) / step) * step for x in row]
    largest = max(abs(x) for x in row) or 1.0
    if name == "int8":
        return [round(x / largest * 127) * largest / 127 for x in row]
    # e4m3: 3 bits behind the leading one, exponents from -6, largest 448.
    found = []
    for x in row:
        y = x / largest * 448
        step = 2.0 ** (max(math.floor(math.log2(abs(y))), -6) - 3) if y else 1.0
        found.append(round(y / step) * step * largest / 448)
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [16, 21], ids=["whole groups", "a shorter last group"])
def test_what_is_read_is_what_the_formula_gives(name: str, columns: int) -> None:
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
    x[1, :8] = 0
    found = dequantize(quantize(x, name, 8), name, 8, columns)
    expected = [
        [y for start in range(0, columns, 8) for y in by_formula(row[start : start + 8], name)] for row in x.tolist()
    ]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-5)


def test_four_numbers_of_four_bits_are_a_word() -> None:
    values, scale, low = quantize(torch.arange(16.0)[None], "int4", 16)
    words = [number | number + 4 << 4 | number + 8 << 8 | number + 12 << 12 for number in range(4)]
    assert values.tolist() == [[word - (word >> 15 << 16) for word in words]]
    assert (scale.item(), low.item()) == (1.0, 0.0)


def quantized(keys: dict[str, Any], **inference: Any) -> tuple[nn.Module, nn.Module]:
    """A model with quantized weights, and one with the values that they stand for."""
    config = configuration(keys)
    models = [new_model(config) for _ in range(2)]
    for model in models:
        randomize(model)
    options = InferenceConfig(quantize_group_size=16, **inference)
    quantize_weights(models[0], options)
    name = options.quantize_weights
    assert name is not None
    with torch.no_grad():
        for _, module in matrices(models[1], with_output=options.quantize_output_layer):
            weight = module.weight
            weight.copy_(dequantize(quantize(weight, name, 16), name, 16, weight.shape[-1]))
    return models[0], models[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek", "qwen_moe", "hybrid", "gpt_oss"])
def test_generation_is_that_of_the_values_stored(family: str, name: str) -> None:
    """Also in forms of attention and experts that read a weight in another way."""
    config = configuration(FAMILIES[family])
    models = quantized(FAMILIES[family], quantize_weights=name)
    found, expected = (run(engine_of(config, model=model), prompts(9, 4), GREEDY) for model in models)
    for ours, theirs in zip(found, expected, strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=1e-5)


def rounded_rows(x: Tensor) -> Tensor:
    """[..., columns]: each row by_formula, as a group."""
    rows = [by_formula(row, "int8") for row in x.reshape(-1, x.shape[-1]).tolist()]
    return torch.tensor(rows).reshape(x.shape)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_products_round_the_rows_of_both_operands(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dense = torch.randn(2, rows, 40, generator=generator), torch.randn(24, 40, generator=generator)
    added = torch.randn(24, generator=generator) if bias else None
    weight = Int8Matrix(quantize_int8(dense), torch.float32)
    expected = (rounded_rows(x).double() @ rounded_rows(dense).double().T).float()
    expected = expected + added if added is not None else expected
    torch.testing.assert_close(nn.functional.linear(x, weight, added), expected, atol=1e-5, rtol=1e-5)
    x[0, 0] = 0
    assert (
        nn.functional.linear(x, weight, added)[0, 0].tolist() == (torch.zeros(24) if added is None else added).tolist()
    )
    x = torch.randn(2, rows, 40, generator=torch.Generator().manual_seed(1))
    # The operator that GPUs have gives the same.
    values, scale = quantize_int8(x.flatten(0, -2))
    exact = int8_product(values, weight.stored[0]).float() * weight.stored[1].T * scale
    torch.testing.assert_close(
        exact.view_as(expected) + (0 if added is None else added), expected, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(nn.functional.embedding(torch.tensor([3, 0]), weight), rounded_rows(dense)[[3, 0]])


def test_int8_products_of_this_cpu_are_no_reference_kernel() -> None:
    """oneDNN has some of its int8 products for certain CPUs alone; elsewhere they take hundreds of times as long."""
    x, dense = torch.randn(4, 512), torch.randn(1024, 512)
    weight = Int8Matrix(quantize_int8(dense), torch.float32)

    def least(call: Callable[[], object]) -> float:
        call()  # packs the matrix
        return min(elapsed(call, time.process_time) for _ in range(5))

    with torch.inference_mode():
        fp32 = least(lambda: nn.functional.linear(x, dense))
        assert least(lambda: nn.functional.linear(x, weight)) < 20 * fp32


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek", "qwen_moe", "gpt_oss"])
def test_models_with_int8_inputs_compute_the_products_of_rounded_rows(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same engine with rounded weights, whose products round their inputs by the formula; also of experts, and of
    tied heads."""
    config = configuration(FAMILIES[family])
    int8, rounded = new_model(config), new_model(config)
    for model in (int8, rounded):
        randomize(model)
    quantize_weights(int8, InferenceConfig(quantize_weights="int8_dynamic", quantize_output_layer=True))
    found = run(engine_of(config, model=int8), prompts(9, 4), GREEDY)
    chosen = [module for _, module in (*matrices(rounded, with_output=True), *tied_tables(rounded))]
    with torch.no_grad():
        for module in chosen:
            module.weight.copy_(rounded_rows(module.weight))
            if module.weight.ndim == 3:
                module.product = products_of_rounded_rows
    known, plain = {module.weight.data_ptr() for module in chosen}, nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain(rounded_rows(x) if weight.data_ptr() in known else x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", linear)
    # The formula is Python, which a recorded step would not call again.
    eager = configuration(FAMILIES[family], inference={"cuda_graphs": "none"})
    for ours, theirs in zip(found, run(engine_of(eager, model=rounded), prompts(9, 4), GREEDY), strict=True):
        # Rounding moves a number by a whole step where the last bit of an input differs; 0.014 was seen.
        assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=0.03)


def products_of_rounded_rows(x: Tensor, weight: Tensor, groups: Any) -> Tensor:
    found, x = x.new_zeros(len(x), weight.shape[1]), rounded_rows(x)
    for (first, end), matrix in zip(groups.bounds, weight, strict=True):
        found[first:end] = x[first:end] @ matrix.T
    return found


def test_what_is_quantized_and_how_much_it_saves() -> None:
    """3 layers of a Llama of width 32: 8 bits and a scale for 16 numbers, or half of that."""
    sizes = {}
    for name in (None, "int8", "int4"):
        model = new_model(configuration(MODELS["llama"]))
        numbers = sum(module.weight.numel() for _, module in matrices(model, with_output=False))
        names = {path.split(".")[-1] for path, _ in matrices(model, with_output=False)}
        assert names == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
        if name is not None:
            quantize_weights(model, InferenceConfig(quantize_weights=name, quantize_group_size=16))
        sizes[name] = weight_bytes(model)
    assert sizes[None] - sizes["int8"] == numbers * (4 - 1 - 4 / 16)
    assert sizes[None] - sizes["int4"] == numbers * (4 - 0.5 - 8 / 16)


# -- the cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek", "hybrid"])
def test_tokens_do_not_depend_on_how_a_prompt_is_cut(family: str, name: str) -> None:
    """What was computed in the same pass is read as it is stored, too."""
    model = new_model(configuration(FAMILIES[family]))
    randomize(model)
    found = []
    for step, block in ((64, 16), (5, 2)):
        inference = {"cache_dtype": name, "max_tokens_per_step": step, "cache_block_size": block}
        found.append(
            run(engine_of(configuration(FAMILIES[family], inference=inference), model=model), prompts(19, 4), GREEDY)
        )
    for ours, theirs in zip(*found, strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        # The last bit of a key may round to the next number of 8 bits; 1e-4 was seen.
        assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=1e-3)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_attention_reads_the_dequantized_keys_and_values(name: str) -> None:
    """A forward pass whose keys and values go through the formula."""
    from tests.infer.decoding import cached_logits

    model = new_model(configuration(MODELS["gpt2"]))
    randomize(model)
    tokens = torch.tensor(prompts(11))
    expected = cached_logits(model, tokens, (4, 5, 11), cache_dtype=name)
    for layer in model.decoder.layers:
        plain = layer.self_attention.core

        def core(q: Tensor, k: Tensor, v: Tensor, *rest: Any, plain: Any = plain) -> Tensor:
            return plain(q, through(k, name), through(v, name), *rest)

        layer.self_attention.core = core
    with torch.no_grad():
        logits = model(tokens)
    torch.testing.assert_close(expected, logits, atol=1e-5, rtol=1e-4)


def through(x: Tensor, name: str) -> Tensor:
    vectors = [by_formula(vector, name) for vector in x.flatten(0, -2).tolist()]
    return torch.tensor(vectors).view(x.shape)


def test_a_quantized_cache_takes_the_bytes_that_it_says() -> None:
    """2 layers' keys and values of 2 groups: 8 numbers and a scale each."""
    model = new_model(configuration(MODELS["llama"]))
    sizes = [cache_layout(model, name).groups[0].bytes_per_position for name in ("auto", "int8", "fp8")]
    assert sizes == [3 * 2 * 2 * 8 * 4, *[3 * 2 * 2 * (8 + 4)] * 2]


# -- layouts ------------------------------------------------------------------------------------------

INFERENCE = {"quantize_weights": "int4", "quantize_group_size": 4, "cache_dtype": "int8"}


def refusal(rank: int, world: int) -> str:
    """The ranks of linear_fc2 have 24 of its 48 input features each."""
    config = configuration("llama", parallel={"tensor_model_parallel_size": 2})
    ctx = build.build_context(config, torch.device("cpu"))
    model = build.build_model(config, ctx, load_plugins(), None)
    with pytest.raises(ConfigError) as caught:
        quantize_weights(model, InferenceConfig(quantize_weights="int8", quantize_group_size=16))
    assert not any(isinstance(module, QuantizedWeight) for module in model.modules())  # nor are those before it
    return str(caught.value)


@pytest.mark.dist
def test_a_group_is_of_one_rank() -> None:
    for message in run_ranks(2, refusal):
        assert "quantize_group_size=16 does not divide the 24 input features of decoder.layers.0.mlp.li" in message
        assert "it can be 2, 4, 6, 8, 12, 24" in message


TWO_TOKENS = replace(GREEDY, max_tokens=2)
"""Of a prompt's pass and of one that reads the cache: a rank multiplies in Triton's interpreter, which is slow."""


ONE_LAYER = {
    "llama": {**MODELS["llama"], "num_layers": 1},
    "qwen_moe": {**MODELS["qwen_moe"], "num_layers": 1, "moe": {**MODELS["qwen_moe"]["moe"], "moe_layer_freq": 1}},
}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-tp": ("llama", {"tensor_model_parallel_size": 2}, INFERENCE),
    "llama-tp-sp": ("llama", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, INFERENCE),
    # The cache in the model's dtype: sums of experts in another order may round to the next number of 8 bits.
    "qwen_moe-ep": ("qwen_moe", {"expert_model_parallel_size": 2}, {**INFERENCE, "cache_dtype": "auto"}),
}


def on_rank(rank: int, world: int, layout: str) -> list[tuple[list[int], list[float]]] | None:
    family, parallel, inference = LAYOUTS[layout]
    config = configuration(ONE_LAYER[family], parallel=parallel, inference=inference)
    host = load_plugins()
    ctx = build.build_context(config, torch.device("cpu"))
    model = build.build_model(config, ctx, host, None)
    initialize(model, 1, ctx)
    quantize_weights(model, config.section(InferenceConfig))
    engine = LockstepEngine(InferenceEngine(model, None, ctx, config.section(InferenceConfig), longest=64))
    if rank:
        return engine.follow()
    found = [(tokens_of(events), logprobs_of(events)) for events in run(engine, prompts(9, 4), TWO_TOKENS)]
    engine.close()
    return found


RUNS = InTurn(on_rank, [(2, layout) for layout in LAYOUTS])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_stores_the_same_numbers(layout: str) -> None:
    family, _, inference = LAYOUTS[layout]
    config = configuration(ONE_LAYER[family], inference=inference)
    model = new_model(config)
    quantize_weights(model, config.section(InferenceConfig))
    expected = run(engine_of(config, model=model), prompts(9, 4), TWO_TOKENS)
    for (tokens, logprobs), events in zip(RUNS.result(2, layout), expected, strict=True):
        assert tokens == tokens_of(events)
        assert logprobs == pytest.approx(logprobs_of(events), abs=1e-5)


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (
            "llama",
            {"quantize_weights": "int4", "quantize_group_size": 7},
            "size=7 is no multiple of 4.*use 8",
        ),
        ("gpt2", {"quantize_weights": "int8", "quantize_output_layer": True}, "no LM head of its own"),
        ("llama", {"quantize_weights": "int8", "batch_invariant": True}, "batch_invariant"),
        ("llama", {"cache_dtype": "fp8", "batch_invariant": True}, "batch_invariant"),
    ],
)
def test_what_cannot_be_is_refused(model: str, options: dict[str, Any], words: str) -> None:
    def load() -> None:
        config = configuration(model, inference=options)
        quantize_weights(new_model(config), config.section(InferenceConfig))
        engine_of(config)

    with pytest.raises(ConfigError, match=words):
        load()


@pytest.mark.parametrize(
    ("inference", "words"),
    [
        ({"quantize_weights": "int8"}, 'quantize_weights="int8" replaces weights that training changes'),
        ({"speculative_method": "draft_model"}, 'speculative_method="draft_model" loads a second model'),
    ],
)
def test_what_a_running_trainer_cannot_generate_with_is_named(inference: dict[str, str], words: str) -> None:
    training = SimpleNamespace(config=configuration("llama", inference=inference))
    with pytest.raises(ConfigError, match=words):
        TextGenerator.of_engine(training)


# -- a text -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_shows_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small GPT that has learned something: the loss is small, and 4 bits cost more than 8."""
    few = ["train.train_iters=60", "model.num_layers=2", "model.hidden_size=64", "data.seq_length=64"]
    few += ["train.sample_prompt=null", "train.eval_iters=1", "data.corpus_bytes=2000000", "train.micro_batch_size=16"]
    settings = [part for setting in few for part in ("--set", setting)]
    assert mt(["train", *settings, "--run-dir", str(tmp_path / "run")]) == 0
    (tmp_path / "text.py").write_text(Path(inspect.__file__).read_text()[:2000])
    capsys.readouterr()
    group = ["--set", "inference.cache_memory_gb=0.05"]
    assert mt(["quantization", str(tmp_path / "run"), str(tmp_path / "text.py"), *group]) == 0
    shown = capsys.readouterr().out
    print(shown)
    rows = {line[:14].strip(): re.findall(r"[-+]?[\d.]+", line[14:]) for line in shown.splitlines()[1:]}
    losses = {name: abs(float(row[1])) for name, row in rows.items()}
    assert shown.count("dequantized by torch on CPU") == 3
    assert list(rows) == [
        "as it is",
        "weights int8",
        "int8_dynamic",
        "weights fp8",
        "weights int4",
        "cache int8",
        "cache fp8",
    ]
    assert 1 < float(rows["as it is"][0]) < 100
    assert max(losses[name] for name in ("weights int8", "cache int8")) < 0.5
    assert max(losses[name] for name in ("weights fp8", "cache fp8")) < 3
    assert losses["weights int8"] < losses["weights int4"] < 10
    assert float(rows["weights int4"][2]) < float(rows["weights int8"][2]) < float(rows["as it is"][2])


@pytest.mark.slow
def test_generate_takes_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["train.train_iters=1", "lr_schedule.lr_warmup_iters=0", "model.num_layers=1", "model.hidden_size=32"]
    few += ["model.num_attention_heads=2", "data.seq_length=32", "train.sample_prompt=null", "train.eval_iters=1"]
    settings = [part for setting in (*few, "data.corpus_bytes=1000000") for part in ("--set", setting)]
    assert mt(["train", *settings, "--run-dir", str(tmp_path / "run")]) == 0
    keys = ["inference.quantize_weights=int8", "inference.cache_dtype=fp8"]
    options = [part for key in keys for part in ("--set", key)]
    assert mt(["generate", str(tmp_path / "run"), "--prompt", "def ", "--max-tokens", "3", *options]) == 0
    assert "def " in capsys.readouterr().out
