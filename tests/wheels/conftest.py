"""Wheels of the workspace and of the example plugin, and clean environments to install them in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "mt-core",
    "mt-models",
    "mt-data",
    "mt-ckpt",
    "mt-moe",
    "mt-infer",
    "mt-tools",
    "mt-import",
    "mt-ops",
    "mt-tune",
    "mt-eval",
    "mt-accelerate",
    "mt-retrieval",
    "mt-cli",
)
EXAMPLE = ROOT / "examples" / "mt-plugin-example"
MT_VARIABLES = ("MT_PLUGINS", "MT_PLUGINS_STRICT", "MT_DEBUG")
PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV")


def uv(*arguments: object) -> None:
    program = shutil.which("uv")
    if program is None:
        pytest.skip("uv is not on the PATH")
    done = subprocess.run([program, "-q", *map(str, arguments)], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution -> its wheel, built from this tree."""
    house = tmp_path_factory.mktemp("wheels")
    for folder in [*(ROOT / "packages" / name for name in PACKAGES), EXAMPLE]:
        uv("build", "--wheel", "--no-sources", "--out-dir", house, folder)
    return {path.name.split("-")[0].replace("_", "-"): path for path in house.glob("*.whl")}


@dataclass(frozen=True)
class Environment:
    """A virtual environment with some wheels in it and nothing else of ours."""

    folder: Path

    def __call__(self, *command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        program, *arguments = map(str, command)
        settings = {key: value for key, value in os.environ.items() if key not in MT_VARIABLES + PYTHON_VARIABLES}
        return subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd or self.folder,
            env={**settings, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        )

    def has(self, module: str) -> bool:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return self("python", "-c", code).returncode == 0


@pytest.fixture(scope="session")
def install(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """Makes an environment with the wheels of these distributions ("mt-core[train]" with its extra).

    Everything else comes in the versions of the environment that runs the tests, so mostly from uv's cache.
    """
    constraints = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    own = {*PACKAGES, "mt-plugin-example"}
    lines = sorted({f"{d.name}=={d.version}" for d in distributions() if d.name not in own})
    constraints.write_text("\n".join(lines) + "\n")

    def make(*names: str) -> Environment:
        folder = tmp_path_factory.mktemp("environment") / "venv"
        uv("venv", "--python", sys.executable, folder)
        parts = [name.partition("[") for name in names]
        requirements = [f"{name} {bracket}{extra} @ {wheels[name].as_uri()}" for name, bracket, extra in parts]
        uv("pip", "install", "--python", folder / "bin" / "python", "--constraint", constraints, *requirements)
        return Environment(folder)

    return make
