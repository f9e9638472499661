"""Whether Triton kernels can run here."""

from __future__ import annotations

import os
from importlib.util import find_spec


def is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_objection(device_type: str) -> str | None:
    """The reason why not; None if they can. TRITON_INTERPRET=1 runs them on a CPU, slowly, for tests. On the meta
    device nothing runs: what is planned there replaces them."""
    if device_type == "meta":
        return None
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if device_type != "cuda" and not is_interpreted():
        return f"Triton kernels need a GPU, and the device is {device_type}"
    return None
