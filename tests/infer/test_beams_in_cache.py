"""Beams in the cache: blocks in common, too little memory, and layouts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.dist.in_turn import InTurn
from tests.infer.beams import BEAMS, beams_of
from tests.infer.engines import configuration, engine_of, prompts, run, tokens_of
from tests.infer.references import engine_like

from mt_core.errors import ConfigError
from mt_infer.cache.layout import SNAPSHOTS
from mt_infer.lockstep import LockstepEngine
from mt_infer.sampling.parameters import SamplingParameters

MODELS = ["llama", "bamba", "mistral"]
"""Attention to all positions, recurrent states, a window."""
GIB = 2**30


def test_full_blocks_are_shared() -> None:
    engine = engine_like("llama", max_tokens_per_step=64)
    engine.add(prompts(23)[0], SamplingParameters(num_beams=4, max_tokens=20))
    engine.step()
    # The prompt has 5 full blocks of 4 positions; its last block is one for each beam.
    assert engine.manager.used_blocks == 5 + 4
    engine.step()
    engine.step()
    assert engine.manager.used_blocks <= 6 + 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_beams_that_wait_for_memory_are_the_same(name: str) -> None:
    texts, asked = prompts(5, 11, 3, 7, 9, 6), [*BEAMS[:3], *BEAMS[:3]]
    roomy = engine_like(name, longest=24, max_requests=18)
    bytes_per_block = sum(group.bytes_per_position for group in roomy.manager.layout.groups) * 4
    # 20 blocks, 14 of the 102 beyond one sequence of the longest length, and as large a share of the snapshots.
    states = (18 + 1 + SNAPSHOTS * 14 / 102) * roomy.manager.layout.bytes_per_sequence
    tight = engine_like(name, longest=24, max_requests=18, cache_memory_gb=(20.1 * bytes_per_block + states) / GIB)
    found = [run(engine, texts, asked) for engine in (roomy, tight)]
    assert tight.scheduler.preemptions > roomy.scheduler.preemptions == 0
    for own, other, sampling in zip(*found, asked, strict=True):
        assert [tokens for tokens, _ in beams_of(own, sampling)] == [tokens for tokens, _ in beams_of(other, sampling)]
    assert tight.manager.used_blocks == 0


def test_a_cancelled_search_frees_its_memory() -> None:
    engine = engine_like("bamba")
    request = engine.add(prompts(6)[0], SamplingParameters(num_beams=3, max_tokens=20))
    engine.step()
    engine.step()
    assert [event.finish for event in engine.cancel(request)] == ["cancelled"]
    assert engine.is_idle
    assert engine.manager.used_blocks == 0


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (SamplingParameters(num_beams=5, max_tokens=4), "num_beams=5 is above inference.max_requests=4"),
        (SamplingParameters(num_beams=4, max_tokens=60), "does not hold num_beams=4 sequences of 64 positions"),
    ],
)
def test_searches_that_cannot_run(sampling: SamplingParameters, words: str) -> None:
    engine = engine_like("llama", cache_memory_gb=0.00003 * 3)
    with pytest.raises(ConfigError, match=words):
        engine.add(prompts(4)[0], sampling)


def searched(engine: Any) -> list[list[list[int]]]:
    found = run(engine, prompts(5, 9, 6), [*BEAMS[:2], SamplingParameters(temperature=0.0, max_tokens=8)])
    return [[tokens_of([one for one in events if one.index == index]) for index in range(3)] for events in found]


def on_rank(rank: int, world: int, layout: str) -> Any:
    model, parallel = LAYOUTS[layout]
    engine = LockstepEngine(engine_of(configuration(model, parallel=parallel), collective=True))
    if rank:
        return engine.follow()
    found = searched(engine)
    engine.close()
    return found


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tp": ("llama", {"tensor_model_parallel_size": 2}),
    "hybrid-pp": ("hybrid", {"pipeline_model_parallel_size": 2}),
    "llama-dp": ("llama", {}),
}
RUNS = InTurn(on_rank, [(2, layout) for layout in LAYOUTS])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_layouts(layout: str) -> None:
    assert RUNS.result(2, layout) == searched(engine_of(configuration(LAYOUTS[layout][0])))
