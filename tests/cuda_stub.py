"""Programs on GPUs that are not there (bench/cuda_stub): kernels do nothing; torch, its allocator, Triton's compiler
and our code are the real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.built_once import built_once

STUB = Path(__file__).parents[1] / "bench" / "cuda_stub"
NEEDED = ("gcc", "nm", "bash")

on_stub = [
    pytest.mark.long,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU of this machine would be replaced"),
]
"""Marks of tests that use the stub."""


@pytest.fixture(scope="module")
def environ(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of processes on the stub, which is built once for all workers."""
    build = str(STUB / "build.py")
    folder = built_once(
        request, "cuda_stub", lambda folder: subprocess.run([sys.executable, build, str(folder)], check=True)
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "MT_CUDA_STUB": str(folder), "PYTHONWARNINGS": "ignore"}


def printed_on_stub(environ: dict[str, str], script: Path, *arguments: str) -> str:
    """What a Python script prints."""
    command = [str(STUB / "run.sh"), sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
