"""Saving and reading hold one tensor at a time, however much there is and however large the shards are."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from mt_ckpt.native.read import open_checkpoint
from mt_ckpt.native.save import save_checkpoint
from mt_core.testing import run_ranks

pytestmark = pytest.mark.slow

NUM_TENSORS = 12
TENSOR_MIB = 16
ALLOWED_MIB = 3 * TENSOR_MIB
"""One tensor that is written, one that the source may already make, and small things."""


def lazy_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    for i in range(NUM_TENSORS):
        yield f"t{i}", torch.from_numpy(np.full(TENSOR_MIB << 18, i, dtype=np.float32))


def peak_mib() -> float:
    """Since `forget_peak`: getrusage would go on from what the process was forked from."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def map_arrays() -> None:
    """glibc keeps freed tensors in its heap once it has seen one freed, so that what is resident says little of what is
    held; with a fixed threshold each array is mapped, and unmapped when it is freed."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


M_MMAP_THRESHOLD = -3
"""Of malloc.h."""


def save_then_read(rank: int, world: int, folder: Path) -> tuple[float, float, float]:
    """Peaks of saving and of reading, and what is resident more when all tensors are held; in MiB."""
    map_arrays()
    # What the first call allocates once, whatever the size of tensors.
    save_checkpoint(folder / "small", iter([("t", torch.zeros(1))]), {}, {})
    open_checkpoint(folder / "small").read("t")
    gc.collect()
    forget_peak()
    before = resident_mib()
    save_checkpoint(folder / "c", lazy_tensors(), {}, {})
    saving = peak_mib() - before
    reader = open_checkpoint(folder / "c")
    for i, name in enumerate(reader.shapes()):
        assert (reader.read(name).numpy() == i).all()
    reading = peak_mib() - before
    held = list(lazy_tensors())
    assert len(held) == NUM_TENSORS
    return saving, reading, peak_mib() - before


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_peak_memory(tmp_path: Path) -> None:
    # In a process of the fork server: this one keeps memory that tests before have freed, and uses it again.
    ((saving, reading, holding_all),) = run_ranks(1, save_then_read, tmp_path)
    assert saving < ALLOWED_MIB
    assert reading < ALLOWED_MIB
    assert holding_all > NUM_TENSORS * TENSOR_MIB * 0.9  # the measure would show what was held
