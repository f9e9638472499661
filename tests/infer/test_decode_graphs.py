"""Decode steps as graphs: the same tokens and log-probabilities as without, in memory that stays where it is."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from tests.core.train.cuda_graphs.replayed import TapeRecorder
from tests.core.train.test_steady_step import Spy
from tests.infer.engines import configuration, engine_of, logprobs_of, new_model, prompts, randomize, run, tokens_of
from tests.infer.test_families import FAMILIES, TINY
from torch import nn

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_infer.config import InferenceConfig
from mt_infer.decode_graphs import DecodeGraphs, batch_sizes, layer_objections, uses_graphs
from mt_infer.engine import InferenceEngine
from mt_infer.recorded_steps import CpuRecorder, place_by_lifetime
from mt_infer.sampling.parameters import SamplingParameters

GREEDY = SamplingParameters(temperature=0.0, max_tokens=9, logprobs=2)
LENGTHS = (5, 1, 11, 2, 8)
CASES = {
    "learned positions": "gpt2",
    "alibi": "bloom",
    "grouped": "llama",
    "window": "mistral",
    "soft cap, window": "gemma2",
    "sinks, experts": "gpt_oss",
    "latents, experts": "deepseek",
    "chosen keys": "deepseek_v32",
    "chosen blocks": "minimax_m3",
    "chosen keys, shared": "glm_5",
    "window and compressed entries": "deepseek_v4",
    "experts": "mixtral",
    "recurrent": "mamba",
    "recurrent and full": "hybrid",
}
BY_PRODUCT = {"moe_grouped_gemm": "grouped"}


def model_keys(name: str) -> dict:
    keys = FAMILIES[name]
    return {**keys, "moe": {**keys["moe"], **BY_PRODUCT}} if "moe" in keys else keys


def engines(name: str, **options: object) -> tuple[InferenceEngine, InferenceEngine, TapeRecorder]:
    """Without graphs, and with taped ones, of one model."""
    config = configuration(model_keys(name), inference={**TINY, **options})
    model = new_model(config)
    randomize(model)
    plain, graphed = (engine_of(config, model=model) for _ in range(2))
    plain.graphs = None
    recorder = TapeRecorder()
    graphed.graphs = DecodeGraphs(graphed.runner, graphed.manager, recorder)
    return plain, graphed, recorder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_graphs_give_the_tokens_of_the_steps_they_replace(case: str) -> None:
    """Requests of unequal lengths wait, join and end, so that batches of 1 to 3 sequences fill rows of 1 to 4."""
    plain, graphed, recorder = engines(CASES[case])
    assert list(layer_objections(graphed.model, graphed.options, graphed.ctx)) == []
    expected, found = (run(engine, prompts(*LENGTHS), GREEDY) for engine in (plain, graphed))
    for own, other in zip(found, expected, strict=True):
        assert tokens_of(own) == tokens_of(other)
        assert logprobs_of(own) == pytest.approx(logprobs_of(other), abs=2e-5)
    (pool,) = recorder.pools
    assert len(pool) == recorder.runs_aside == 3  # for 1, 2 and 4 rows
    assert sum(graph.replays for graph in pool) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_of_a_cpu_give_the_same_tokens(case: str) -> None:
    """One to three sequences, whose products are those of torch and of packed weights."""
    plain, recorded, _ = engines(CASES[case])
    recorded.graphs = DecodeGraphs(recorded.runner, recorded.manager, CpuRecorder())
    expected, found = (run(engine, prompts(*LENGTHS), GREEDY) for engine in (plain, recorded))
    for own, other in zip(found, expected, strict=True):
        assert tokens_of(own) == tokens_of(other)
        assert logprobs_of(own) == pytest.approx(logprobs_of(other), abs=2e-5)
    assert set(recorded.graphs.captured) >= {1, 3}


def test_packed_weights_follow_a_change_of_weights() -> None:
    plain, recorded, _ = engines("llama")
    recorded.graphs = DecodeGraphs(recorded.runner, recorded.manager, CpuRecorder())
    for _ in range(2):
        expected, found = (run(engine, prompts(*LENGTHS), GREEDY) for engine in (plain, recorded))
        assert [tokens_of(one) for one in found] == [tokens_of(one) for one in expected]
        in_place(plain.model)  # of both
        for engine in (plain, recorded):
            engine.weights_changed()


def test_an_engine_on_a_cpu_records_its_steps() -> None:
    assert isinstance(engine_of(configuration("llama")).graphs.recorder, CpuRecorder)
    for options in ({"cuda_graphs": "none"}, {"cache_dtype": "int8"}, {"speculative_method": "ngram"}):
        assert engine_of(configuration("llama", inference=options)).graphs is None
    assert engine_of(configuration("llama", numerics={"batch_invariant": True})).graphs is None


def test_memory_of_steps_is_shared_by_tensors_that_are_not_needed_at_once() -> None:
    draw = random.Random(3)
    for _ in range(50):
        count = draw.randint(1, 30)
        lives = {one: tuple(sorted((draw.randrange(40), draw.randrange(40)))) for one in range(count)}
        sizes = {one: 64 * draw.randint(1, 9) for one in range(count)}
        starts, total = place_by_lifetime(lives, sizes)
        for one, other in combinations(range(count), 2):
            meet = lives[one][0] <= lives[other][1] and lives[other][0] <= lives[one][1]
            apart = starts[one] + sizes[one] <= starts[other] or starts[other] + sizes[other] <= starts[one]
            assert apart or not meet
        assert total == max(starts[one] + sizes[one] for one in range(count))
    # A chain, in which each tensor is read by the next step alone.
    lives = {one: (one, one + 1) for one in range(100)}
    assert place_by_lifetime(lives, dict.fromkeys(lives, 64))[1] == 128


def test_preempted_sequences_forked_beams_and_drawn_tokens() -> None:
    """Blocks of a sequence change while its length stays: beams are copied, and memory is given up and taken again."""
    beams = SamplingParameters(num_beams=3, max_tokens=9)
    drawn = SamplingParameters(temperature=0.9, top_k=20, seed=4, max_tokens=9, n=2)
    asked = [beams, drawn, replace(GREEDY, logprobs=None), drawn, beams]
    options = {"max_requests": 6, "max_tokens_per_step": 32}
    plain, graphed, _ = engines("llama", **options)
    expected, found = (run(engine, prompts(*LENGTHS), asked) for engine in (plain, graphed))
    assert [tokens_of(one) for one in found] == [tokens_of(one) for one in expected]


def test_weights_changed_in_place_are_used_and_moved_ones_captured_again() -> None:
    plain, graphed, recorder = engines("llama")
    for change in (in_place, moved):
        before = run(graphed, prompts(6), GREEDY)
        change(graphed.model)
        for engine in (plain, graphed):
            engine.weights_changed()
        expected, found = (run(engine, prompts(6), GREEDY) for engine in (plain, graphed))
        assert logprobs_of(found[0]) == pytest.approx(logprobs_of(expected[0]), abs=2e-5)
        assert logprobs_of(found[0]) != pytest.approx(logprobs_of(before[0]), abs=1e-2)
    assert len(recorder.pools[0]) == 2  # one row, captured twice


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.1)


@torch.no_grad()
def moved(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


@pytest.mark.parametrize("case", ["grouped", "latents, experts", "chosen keys", "recurrent and full"])
def test_the_host_waits_for_the_tokens_of_a_step_alone(case: str) -> None:
    _, graphed, _ = engines(CASES[case])
    for text in prompts(4, 6, 5):
        graphed.add(text, SamplingParameters(temperature=0.0, max_tokens=12, ignore_eod=True))
    for _ in range(5):
        graphed.step()
    with Spy() as spy:
        graphed.step()
    assert spy.methods == {"tolist": spy.waits} == {"tolist": 1}


def test_batch_sizes() -> None:
    assert [batch_sizes(most) for most in (1, 3, 8, 17)] == [(1,), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16, 24)]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("llama", {}, "this engine is on cpu; use a GPU"),
        ("llama", {"batch_invariant": True}, "numerics.batch_invariant=true computes sequences one by one"),
        ("llama", {"cache_dtype": "int8"}, "inference.cache_dtype=int8 is dequantized"),
        ("llama", {"speculative_method": "ngram"}, "inference.speculative_method=ngram computes several"),
        ("t5", {}, "EncoderDecoder|encoder"),
        ("mixtral", {}, "moe_grouped_gemm=loop"),
    ],
)
def test_what_graphs_do_not_support_is_named(model: str, options: dict, words: str) -> None:
    config = configuration(FAMILIES[model], inference=options)
    objections = layer_objections(built := new_model(config), config.section(InferenceConfig), ParallelContext())
    wanted = config.section(InferenceConfig).model_copy(update={"cuda_graphs": "decode"})
    with pytest.raises(ConfigError, match="inference.cuda_graphs=decode cannot be: ") as refused:
        uses_graphs(built, wanted, ParallelContext(), config.numerics.batch_invariant)
    assert re.search(words, " ".join([str(refused.value), *objections]))
    assert not uses_graphs(built, config.section(InferenceConfig), ParallelContext())
