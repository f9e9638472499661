"""Packages that mt can do without: whether they are there, whether they work, and what they are for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from typing import Literal

IMPORT_TIMEOUT = 120
"""Seconds. A GPU package may compile or load hundreds of megabytes when it is imported."""

State = Literal["usable", "unusable", "missing"]


@dataclass(frozen=True)
class Package:
    """An importable package. `proof` is a submodule that only the package we mean has."""

    module: str
    gives: str
    proof: str | None = None


KERNELS = (
    Package("triton", "kernels written in Python, and torch.compile, on GPUs"),
    Package("flash_attn", "FlashAttention: exact attention without the score matrix"),
    Package("transformer_engine", "fp8 and fused layers on Hopper and later GPUs"),
    Package("apex", "NVIDIA Apex: fused norms, optimizers and weight gradients", proof="multi_tensor_apply"),
    Package("liger_kernel", "fused cross entropy, norms and SwiGLU in Triton"),
    Package("torchao", "fp8 and low-bit training and quantization"),
    Package("causal_conv1d", "the short convolution of Mamba layers"),
    Package("mamba_ssm", "the selective scan of Mamba layers"),
)

DATA_PACKAGES = (
    Package("fsspec", "data on object stores and other remote file systems"),
    Package("pyarrow", "Parquet and Arrow files"),
    Package("backports.zstd", "files compressed with zstd"),
    Package("tokenizers", "Hugging Face tokenizers"),
    Package("sentencepiece", "SentencePiece tokenizers"),
    Package("tiktoken", "tiktoken vocabularies"),
    Package("transformers", "reference models to compare with"),
)


@dataclass(frozen=True)
class Finding:
    """What is known of one package."""

    package: Package
    state: State
    version: str | None = None
    reason: str | None = None
    """Why it is unusable or counts as missing."""


def examine(packages: Sequence[Package]) -> list[Finding]:
    """Look for each package; those that are there are imported in processes of their own, all at once."""
    found = {package: locate(package) for package in packages}
    # In other processes: a broken GPU package can end the process that imports it by a signal.
    imports = {package: _start_import(package.module) for package, finding in found.items() if not finding}
    return [found[package] or _await_import(package, imports[package]) for package in packages]


def locate(package: Package) -> Finding | None:
    """A finding for a package that is not there, or is another project of the same name; None if it is there."""
    try:
        spec = find_spec(package.module)
    except (ImportError, ValueError) as error:
        return Finding(package, "unusable", reason=str(error))
    if spec is None:
        return Finding(package, "missing")
    if package.proof and not _has_submodule(spec, package.proof):
        return Finding(package, "missing", reason=f"another project named {package.module} is installed")
    return None


def _has_submodule(spec: ModuleSpec, name: str) -> bool:
    """Looked for by its file: importing the package to see could run anything."""
    return PathFinder.find_spec(f"{spec.name}.{name}", list(spec.submodule_search_locations or [])) is not None


def _start_import(module: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"import {module}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _await_import(package: Package, process: subprocess.Popen[str]) -> Finding:
    installed = distribution_version(package.module)
    try:
        _, complaint = process.communicate(timeout=IMPORT_TIMEOUT)
    except subprocess.TimeoutExpired:
        # communicate again after the kill: it reaps the process and closes the pipe.
        process.kill()
        process.communicate()
        return Finding(package, "unusable", installed, f"importing it takes more than {IMPORT_TIMEOUT} s")
    if process.returncode == 0:
        return Finding(package, "usable", installed)
    if process.returncode < 0:
        return Finding(package, "unusable", installed, f"importing it ends with signal {-process.returncode}")
    # The last line of a traceback is the exception.
    last = complaint.strip().splitlines()[-1:] or [f"importing it ends with status {process.returncode}"]
    return Finding(package, "unusable", installed, last[0])


def distribution_version(module: str) -> str | None:
    """Version of the distribution that brings a module."""
    try:
        # Names differ: the module flash_attn comes with flash-attn, backports.zstd with backports.zstd.
        return version(packages_distributions().get(module, [module])[0])
    except PackageNotFoundError:
        return None
