"""Facts about this machine: torch, devices, optional packages, versions of the distributions of mt."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from mt_core.plugins import PluginHost

CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
GIB = 2**30
FP8_CAPABILITY = (8, 9)
"""First compute capability whose tensor cores multiply fp8."""


def system_facts() -> dict[str, str]:
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": _cores(),
        "memory": _memory(),
    }


def _cores() -> str:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return str(total) if usable == total else f"{usable} of {total} usable by this process"


def _memory() -> str:
    """Physical memory, and the limit of the container if it is lower."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return "unknown"
    limit = _cgroup_limit()
    limited = f" (this container may use {limit / GIB:.1f} GiB)" if limit and limit < physical else ""
    return f"{physical / GIB:.1f} GiB{limited}"


def _cgroup_limit() -> int | None:
    try:
        text = CGROUP_MEMORY.read_text(encoding="ascii").strip()
    except OSError:
        return None
    # cgroup v2 writes "max" where there is no limit.
    return int(text) if text.isdigit() else None


def torch_facts() -> dict[str, str]:
    """Versions, devices and backends of torch; one line that says why not, if it cannot be imported."""
    if find_spec("torch") is None:
        return {"torch": 'missing (pip install "mt-core[train]")'}
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        return {"torch": f"installed but unusable: {type(error).__name__}: {error}"}
    return {
        "torch": torch.__version__,
        "threads": f"{torch.get_num_threads()} within an operation, {torch.get_num_interop_threads()} between",
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}; {_formats(torch, 'cpu')}",
        "cuda": _cuda(torch),
        **_gpus(torch),
        "distributed": ", ".join(_backends(torch)) or "none",
    }


def _cuda(torch: ModuleType) -> str:
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    if not built:
        return "torch is built without it"
    if not torch.cuda.is_available():
        return f"torch is built for {built}, but finds no device"
    return f"{built}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.device_count()} devices"


def _gpus(torch: ModuleType) -> dict[str, str]:
    facts = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        capability = (about.major, about.minor)
        formats = _formats(torch, f"cuda:{index}") + (", fp8" if capability >= FP8_CAPABILITY else "")
        memory = f"{about.total_memory / GIB:.0f} GiB"
        facts[f"cuda:{index}"] = f"{about.name}, {memory}, capability {about.major}.{about.minor}; {formats}"
    return facts


def _formats(torch: ModuleType, device: str) -> str:
    """Dtypes in which a matrix product works."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return ", ".join(name for name, dtype in dtypes.items() if _multiplies(torch, device, dtype))


def _multiplies(torch: ModuleType, device: str, dtype: Any) -> bool:
    try:
        matrix = torch.ones(16, 16, device=device, dtype=dtype)
        # Tried out instead of looked up: builds of torch differ in which dtypes a device can multiply. 16 ones add up
        # exactly.
        return bool((matrix @ matrix == 16).all())
    except RuntimeError:
        return False


def _backends(torch: ModuleType) -> list[str]:
    """Communication backends that torch.distributed was built with."""
    if not torch.distributed.is_available():
        return []
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    # bool() is False: an older torch does not have all of these functions.
    return [name for name in names if getattr(torch.distributed, f"is_{name}_available", bool)()]


# -- optional packages -------------------------------------------------------------------------------

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
    Package("fla", "flash-linear-attention: the rules of delta nets and RWKV-7 layers"),
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
    findings = {package: locate(package) for package in packages}
    # In other processes: a broken GPU package can end the process that imports it by a signal.
    imports = {package: _start_import(package.module) for package, finding in findings.items() if not finding}
    return [findings[package] or _await_import(package, imports[package]) for package in packages]


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


# -- versions of mt and its plugins ------------------------------------------------------------------


def distribution_versions(host: PluginHost) -> dict[str, str]:
    """Distribution -> version, for each that brings a plugin; mt's own first."""
    versions = {plugin.distribution: plugin.version for plugin in host.plugins}
    return {name: versions[name] for name in sorted(versions, key=lambda name: (not name.startswith("mt-"), name))}


def version_lines(host: PluginHost) -> list[str]:
    versions = distribution_versions(host)
    width = max(map(len, versions), default=0)
    return [f"{name:<{width}}  {version}" for name, version in versions.items()]
