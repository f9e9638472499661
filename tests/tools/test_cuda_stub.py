"""Steady steps through the code of a GPU, counted by a stub of CUDA (bench/cuda_stub): kernels do nothing there; torch,
its allocator, Triton's compiler and our code are the real ones. 20 CPU seconds in all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.built_once import built_once

ROOT = Path(__file__).parents[2]
STUB = ROOT / "bench" / "cuda_stub"
NEEDED = ("gcc", "nm", "bash")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU of this machine would be replaced"),
]


@pytest.fixture(scope="module")
def environ(request: pytest.FixtureRequest) -> dict[str, str]:
    folder = built_once(
        request, "cuda_stub", lambda folder: run_python([str(STUB / "build.py"), str(folder)], os.environ)
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "MT_CUDA_STUB": str(folder), "PYTHONWARNINGS": "ignore"}


def run_python(arguments: list[str], environ) -> str:
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, check=True).stdout


def step_counts(environ: dict[str, str], *arguments: str) -> dict[str, dict[str, float]]:
    """Preset -> its counts."""
    command = [str(STUB / "run.sh"), sys.executable, str(STUB / "step_counts.py"), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
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
