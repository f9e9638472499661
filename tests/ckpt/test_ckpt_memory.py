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

pytestmark = pytest.mark.slow

NUM_TENSORS = 24
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


def return_freed_memory() -> None:
    """glibc keeps freed tensors in its heap once it has seen one freed, so that what is resident says little of what is
    held. Pages that are free already are returned, and above a fixed threshold later ones are returned when freed."""
    gc.collect()
    with suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
        libc.malloc_trim(0)


M_MMAP_THRESHOLD = -3
"""Of malloc.h."""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_peak_memory(tmp_path: Path, kit, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c"

    def save_then_read() -> None:
        return_freed_memory()
        # What the first call allocates once, whatever the size of tensors.
        save_checkpoint(tmp_path / "small", iter([("t", torch.zeros(1))]), {}, {})
        open_checkpoint(tmp_path / "small").read("t")
        return_freed_memory()
        forget_peak()
        before = resident_mib()
        save_checkpoint(path, lazy_tensors(), {}, {})
        saving = peak_mib() - before
        reader = open_checkpoint(path)
        for i, name in enumerate(reader.shapes()):
            assert (reader.read(name).numpy() == i).all()
        reading = peak_mib() - before
        return_freed_memory()
        before = resident_mib()
        held = list(lazy_tensors())
        print(saving, reading, resident_mib() - before, flush=True)
        del held

    assert kit.in_child(save_then_read) == 0
    saving, reading, holding_all = map(float, capfd.readouterr().out.split())
    assert saving < ALLOWED_MIB
    assert reading < ALLOWED_MIB
    assert holding_all > NUM_TENSORS * TENSOR_MIB * 0.9  # the measure would show what was held
