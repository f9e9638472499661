"""What a compiled kernel takes of a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton


def bytes_of_stack(cubin: bytes, folder: Path) -> int:
    """Of a thread: where values are put for which there are no registers."""
    return resources(cubin, folder)["STACK"]


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """What cuobjdump says of a thread of the kernel: REG, STACK and others. folder: for a file."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", printed)}
