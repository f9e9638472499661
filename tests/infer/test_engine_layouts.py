"""An engine over several ranks gives the tokens of one process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.ckpt.convert_cases import MODELS
from tests.dist.in_turn import InTurn
from tests.infer.engines import configuration, engine_of, logprobs_of, prompts, run, tokens_of

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


def on_rank(rank: int, world: int, layout: str) -> Outputs | None:
    model, parallel, inference = LAYOUTS[layout]
    config = configuration(model, parallel=parallel, inference=inference)
    engine = LockstepEngine(engine_of(config, longest=LONGEST, collective=True))
    if rank:
        return engine.follow()
    found = generated(engine)
    engine.close()
    assert engine.engine.manager.used_blocks == 0
    return found


WINDOWS = {**MODELS["gemma3"], "num_layers": 3}
STATES = {**MODELS["hybrid"], "hybrid_layer_pattern": "M-M-**"}
LAYOUTS: dict[str, tuple[str | dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama-tp": ("llama", {TP: 2}, {}),
    "llama-tp-sp": ("llama", {TP: 2, "sequence_parallel": True}, {}),
    "llama-pp": ("llama", {PP: 2}, {}),
    "llama-dp": ("llama", {}, {}),
    "qwen_moe-ep": ("qwen_moe", {EP: 2}, {}),
    "hybrid-tp": ("hybrid", {TP: 2}, {}),
    "qwen_next-tp": ("qwen_next", {TP: 2}, {}),
    # One layer here and two there, windows here and recurrent states there: the memory holds few sequences, and
    # unequal stages have to make the same decisions.
    "few windows-pp": (WINDOWS, {PP: 2}, {"cache_memory_gb": 12_500 / 2**30}),
    "few states-pp": (STATES, {PP: 2}, {"cache_memory_gb": 45_000 / 2**30}),
    "gpt2-tp-pp": ("gpt2", {TP: 2, PP: 2}, {}),
    "deepseek-tp-ep": ("deepseek", {EP: 2, TP: 2}, {}),
}
ON_FOUR = ("gpt2-tp-pp", "deepseek-tp-ep")
RUNS = InTurn(on_rank, [(4 if layout in ON_FOUR else 2, layout) for layout in LAYOUTS])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_one_process(layout: str) -> None:
    reference = generated(engine_of(configuration(LAYOUTS[layout][0]), longest=LONGEST))
    found = RUNS.result(4 if layout in ON_FOUR else 2, layout)
    for (tokens, logprobs), (expected, expected_logprobs) in zip(found, reference, strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)


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


STAGES = {"llama": "Ettt|L", "hybrid": "Ettttt|tL"}
"""A stage without layers, and one without recurrent states beside one that has them."""


def scored_on_rank(rank: int, world: int, model: str) -> list[list[float]] | None:
    parallel = {PP: 2, "pipeline_model_parallel_layout": STAGES[model]}
    engine = LockstepEngine(engine_of(configuration(model, parallel=parallel), collective=True))
    if rank:
        return engine.follow()
    found = scored_with_shared_prefixes(engine)
    engine.close()
    return found


SCORED = InTurn(scored_on_rank, [(2, model) for model in STAGES])


@pytest.mark.parametrize("model", STAGES)
def test_stages_that_keep_other_states_share_the_same_prefixes(model: str) -> None:
    found = SCORED.result(2, model)
    for ours, expected in zip(found, scored_with_shared_prefixes(engine_of(configuration(model))), strict=True):
        assert ours == pytest.approx(expected, abs=1e-5)
