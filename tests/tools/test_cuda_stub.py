"""Steady steps through the code of a GPU, counted by a stub of CUDA (bench/cuda_stub): kernels do nothing there; torch,
its allocator, Triton's compiler and our code are the real ones. 20 CPU seconds in all."""

from __future__ import annotations

import json

from tests.cuda_stub import STUB, environ, on_stub, printed_on_stub

__all__ = ["environ"]  # a fixture

pytestmark = on_stub


def step_counts(environ: dict[str, str], *arguments: str) -> dict[str, dict[str, float]]:
    """Preset -> its counts."""
    printed = printed_on_stub(environ, STUB / "step_counts.py", *arguments)
    found = [json.loads(line) for line in printed.splitlines()]
    return {counts.pop("preset"): counts for counts in found}


def require_steady(counts: dict[str, float]) -> None:
    """The host runs ahead of the device by a step, and the device's memory is reused."""
    # The numbers of the step before, whose copy was started then.
    assert counts["waits"] == 1
    assert counts["copies_to_host"] == 1
    assert counts["pageable_copies"] == 0
    assert counts["allocations"] == 0


def test_steady_steps_wait_once_and_launch_what_is_published(environ: dict[str, str]) -> None:
    # 10 bytes a parameter, with gradients that autograd allocates anew in each step; and the same with experts.
    found = step_counts(environ, "8b", "7b-a1b")
    for counts in found.values():
        require_steady(counts)
    # docs/numbers.md. Of each of 32 layers: 4 products forward, 8 backward; of the loss 3 a chunk.
    assert found["8b"]["products"] == 32 * 12 + 2 * 3
    assert found["8b"]["launches"] <= 621
    assert found["8b"]["peak_gb"] < 125  # the goal


def test_a_step_in_a_graph_is_one_launch(environ: dict[str, str]) -> None:
    counts = step_counts(environ, "124m", "--set", "train.cuda_graphs=step")["124m"]
    require_steady(counts)
    assert counts["graph_launches"] == 1
    assert counts["products"] == 0  # all in the graph
