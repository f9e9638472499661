"""Facts about this machine and its torch, each as a word and a value."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

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
    """Number formats in which a matrix product works."""
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
