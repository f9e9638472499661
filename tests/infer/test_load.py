"""What `mt bench generate` counts."""

from __future__ import annotations

import math
import statistics

import pytest
from tests.infer.engines import run, tokens_of
from tests.infer.test_batch_files import generator  # noqa: F401
from tests.infer.test_decode_graphs import engines

from mt_infer.measurements import LoadResult, PassTimes, Served, arrivals, run_load
from mt_infer.sampling.parameters import SamplingParameters


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(20_000, 50.0, seed=1)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # Exponential gaps: the deviation is the mean, and a share of 1 / e is longer than it.
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(1 / math.e, rel=0.05)
    assert arrivals(3, float("inf"), seed=1) == [0.0, 0.0, 0.0]


def test_times_are_those_of_the_tokens(generator) -> None:  # noqa: F811
    found = run_load(generator, [[1, 2, 3]] * 6, 4, arrivals(6, 200.0, seed=2))
    assert [len(one.tokens) for one in found.requests] == [4] * 6
    assert all(one.first > 0 and min(one.gaps) > 0 for one in found.requests)
    assert found.seconds >= max(one.tokens[-1] for one in found.requests)
    assert 0 < found.outside < 1
    assert generator.engine.engine.manager.used_blocks == 0


def test_passes_are_counted_once_eager_or_replayed() -> None:
    """A graph's first use runs the eager pass twice, to warm up and to capture it."""
    counts = []
    for engine in engines("llama")[:2]:
        with PassTimes(engine) as passes:
            events = run(engine, [[1, 2, 3], [4, 5]], SamplingParameters(temperature=0.0, max_tokens=5))
        assert [len(tokens_of(one)) for one in events] == [5, 5]
        assert passes.seconds == pytest.approx(sum(seconds() for seconds in passes.passes))
        assert passes.seconds > 0
        counts.append(len(passes.passes))
        assert "logits" not in vars(engine.runner)
    assert counts == [5, 5]  # the prompts, and a token of each four times


def test_percentiles_are_over_all_requests() -> None:
    requests = [Served(float(number), [number + 1.0, number + 1.5]) for number in range(100)]
    result = LoadResult([*requests[:99], Served(0.0, [10.0, 12.0])], 50.0, 0.1)
    assert result.percentiles(lambda one: [one.first]) == {50: 1.0, 90: 1.0, 99: 10.0}
    assert result.percentiles(lambda one: one.gaps)[50] == 0.5
    assert result.tokens_per_second == 4.0
