"""An engine over several ranks gives the tokens of one process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.ckpt.convert_cases import MODELS
from tests.infer.engines import configuration, engine_of, logprobs_of, prompts, run, tokens_of

from mt_core.testing import run_ranks
from mt_infer.lockstep import LockstepEngine
from mt_infer.sampling.parameters import SamplingParameters

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
SAMPLING = [
    SamplingParameters(temperature=0.0, max_tokens=8, logprobs=1),
    SamplingParameters(temperature=1.0, top_k=20, seed=7, max_tokens=8, logprobs=1),
    SamplingParameters(temperature=0.8, top_p=0.9, seed=8, max_tokens=5, logprobs=1, n=2),
    SamplingParameters(temperature=0.0, max_tokens=8, logprobs=1),
]
LONGEST = 32
Outputs = list[tuple[list[int], list[float]]]


def generated(engine: Any) -> Outputs:
    found = run(engine, prompts(5, 21, 3, 9), SAMPLING)
    each = [[event for event in events if event.index == index] for events in found for index in (0, 1)]
    return [(tokens_of(events), logprobs_of(events)) for events in each]


def on_rank(
    rank: int, world: int, model: str | dict[str, Any], parallel: dict[str, Any], inference: dict[str, Any]
) -> Outputs | None:
    config = configuration(model, parallel=parallel, inference=inference)
    engine = LockstepEngine(engine_of(config, longest=LONGEST, collective=True))
    if rank:
        return engine.follow()
    found = generated(engine)
    engine.close()
    assert engine.engine.manager.used_blocks == 0
    return found


@pytest.mark.parametrize(
    ("world", "model", "parallel"),
    [
        (2, "llama", {TP: 2}),
        (2, "llama", {TP: 2, "sequence_parallel": True}),
        (2, "llama", {PP: 2}),
        (4, "gpt2", {TP: 2, PP: 2}),
        (2, "llama", {}),
        (2, "qwen_moe", {EP: 2}),
        (4, "deepseek", {EP: 2, TP: 2}),
        (2, "hybrid", {TP: 2}),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_process(world, model, parallel) -> None:
    check_tokens(world, model, parallel, {})


def check_tokens(world: int, model: str | dict[str, Any], parallel: dict[str, Any], inference: dict[str, Any]) -> None:
    reference = generated(engine_of(configuration(model), longest=LONGEST))
    found = run_ranks(world, on_rank, model, parallel, inference)[0]
    for (tokens, logprobs), (expected, expected_logprobs) in zip(found, reference, strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("model", "memory"),
    [
        ({**MODELS["gemma3"], "num_layers": 3}, 12_500),
        ({**MODELS["hybrid"], "hybrid_layer_pattern": "M-M-**"}, 45_000),
    ],
    ids=["gemma3", "hybrid"],
)
def test_unequal_stages_make_the_same_decisions(model: dict[str, Any], memory: int) -> None:
    """One layer here and two there, windows here and recurrent states there: the memory holds few sequences."""
    check_tokens(2, model, {PP: 2}, {"cache_memory_gb": memory / 2**30})


def scored_with_shared_prefixes(engine: Any) -> list[list[float]]:
    """Log-probabilities behind a prefix in common, which the second round finds in the cache."""
    prefix, *rest = prompts(21, 5, 9, 3)
    scoring = SamplingParameters(temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=0, prompt_logprobs_start=21)
    found = []
    for _ in range(2):
        for events in run(engine, [[*prefix, *text] for text in rest], scoring):
            given = [one.token for event in events for one in event.prompt_logprobs or () if one is not None]
            found.append([*given[20:], *logprobs_of(events)])
    return found


def scored_on_rank(rank: int, world: int, model: str, parallel: dict[str, Any]) -> list[list[float]] | None:
    engine = LockstepEngine(engine_of(configuration(model, parallel=parallel), collective=True))
    if rank:
        return engine.follow()
    found = scored_with_shared_prefixes(engine)
    engine.close()
    return found


@pytest.mark.parametrize(("model", "stages"), [("llama", "Ettt|L"), ("hybrid", "Ettttt|tL")])
def test_stages_that_keep_other_states_share_the_same_prefixes(model: str, stages: str) -> None:
    """A stage without layers, and one without recurrent states beside one that has them."""
    found = run_ranks(2, scored_on_rank, model, {PP: 2, "pipeline_model_parallel_layout": stages})[0]
    for ours, expected in zip(found, scored_with_shared_prefixes(engine_of(configuration(model))), strict=True):
        assert ours == pytest.approx(expected, abs=1e-5)
