"""A Python environment with Megatron-Core, beside the one of the tests: made once, kept in a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

PYTHON = "3.12"
"""Megatron-Core needs 3.12 since 0.17, and has wheels for it alone."""
REQUIREMENTS = (
    "megatron-core>=0.19,<0.20",
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "einops",
    "pybind11",
    "psutil",
    "multi-storage-client",
    "packaging",
    "regex",
)
INSTALL_SECONDS = 900


def peer_python() -> Path:
    """The interpreter of the environment, made if it is not there yet.

    MT_PEER_PYTHON names one that has everything already. MT_PEER_DIR is where environments are kept, by default
    `mt-peer` in the user's cache folder. Skips the test where Python or the packages cannot be had.
    """
    given = os.environ.get("MT_PEER_PYTHON")
    return Path(given) if given else environment_with(REQUIREMENTS, PYTHON, _interpreter())


def python_beside_this(*requirements: str) -> Path:
    """An interpreter that has these packages first, and behind them all that the environment of the tests has.

    Made, kept and skipped as that of `peer_python`.
    """
    python = environment_with(requirements, sys.version.partition(" ")[0], sys.executable)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = python.parents[1] / "lib" / version / "site-packages"
    path = packages / "environment-of-the-tests.pth"
    path.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", encoding="utf-8")
    return python


PEERS = {
    "quantized": (
        "compressed-tensors>=0.20,<0.21",
        "transformers>=5.23,<6",
        "accelerate",
        "bitsandbytes>=0.50",
        "torchao>=0.18",
        "nvidia-modelopt>=0.47",
        "requests",
        "mlx[cpu]>=0.32",
        "mlx-lm>=0.32",
        "torch",
    ),
    # llama.cpp for a CPU, with its C interface.
    "llama_cpp": ("xllamacpp>=2026.10", "numpy"),
}
"""Environments by what they judge, each without any package of ours."""


def peer_with(name: str) -> Path:
    """The interpreter of one of PEERS, made if it is not there yet; MT_PEER_<NAME> names one that has everything."""
    given = os.environ.get(f"MT_PEER_{name.upper()}")
    return Path(given) if given else environment_with(PEERS[name], sys.version.partition(" ")[0], sys.executable)


def environment_with(requirements: Sequence[str], version: str, interpreter: str) -> Path:
    """The interpreter of an environment in the cache with these packages, made if it is not there yet."""
    folder = _cache() / hashlib.sha256("\n".join((version, *requirements)).encode()).hexdigest()[:16]
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one run ask at the same time
        if not (folder / "complete").exists():
            _make(folder, requirements, interpreter)
    return python


def older_megatron(version: str) -> Path:
    """A folder with another version of Megatron-Core for the same interpreter, made if it is not there yet. Skips the
    test where it cannot be had."""
    return installed_alone(f"megatron-core=={version}", peer_python())


def installed_alone(requirement: str, python: Path = Path(sys.executable)) -> Path:
    """A folder with a package for this interpreter, without what it needs; made if it is not there yet. Skips the test
    where it cannot be had."""
    folder = _cache() / requirement.translate(str.maketrans("=<>", "---"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            install = ["uv", "pip", "install", "--quiet", "--python", str(python), "--no-deps", "--target", str(folder)]
            _run([*install, requirement], f"{requirement} cannot be installed")
            (folder / "complete").touch()
    return folder


def _cache() -> Path:
    given = os.environ.get("MT_PEER_DIR")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mt-peer"


def _make(folder: Path, requirements: Sequence[str], interpreter: str) -> None:
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("the peer's environment is made with uv, which is not on PATH")
    shutil.rmtree(folder, ignore_errors=True)
    _run([uv, "venv", "--quiet", "--python", interpreter, str(folder)], f"no Python {interpreter} for the peer")
    install = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *requirements]
    _run(install, f"{requirements[0]} cannot be installed")
    (folder / "complete").touch()


def _interpreter() -> str:
    """One that pyenv has installed, which uv does not find unless it is switched on; else uv looks for it."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(root.glob(f"versions/{PYTHON}.*/bin/python"))
    return str(installed[-1]) if installed else PYTHON


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        pytest.skip(f"{failure}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
