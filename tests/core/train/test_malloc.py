"""glibc's thresholds: freed memory stays with a process that trains on a CPU, where it may and can."""

from __future__ import annotations

import os

import pytest
import torch

from mt_core.parallel.context import ParallelContext
from mt_core.testing import run_ranks
from mt_core.train import Trainer, memory
from mt_core.train.build import build_model
from mt_core.train.memory import has_own_settings, is_glibc, keep_freed_memory
from mt_core.train.reporting.run_summary import run_summary

LINUX = pytest.mark.skipif(not is_glibc(), reason="needs glibc")


def note(tiny, host, *settings: str, device: str = "cpu") -> str | None:
    config = tiny("model.vocab_size=261", *settings).config
    model = build_model(config, ParallelContext(), host)
    return keep_freed_memory(config, model, ParallelContext(device=torch.device(device)), host)


def page_faults_of_large_tensors(rank: int, world: int, raised: bool) -> int:
    """Of a few tensors of 40 MiB made and freed, one after another."""
    assert not raised or memory.raise_thresholds()
    _make_tensors(20)  # an aligned tensor does not fit where one of its size was, so that the heap grows at first
    before = _page_faults()
    _make_tensors(5)
    return _page_faults() - before


def _make_tensors(count: int) -> None:
    for _ in range(count):
        torch.ones(10 * 2**20)


def _page_faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@LINUX
@pytest.mark.slow
def test_memory_of_freed_tensors_is_used_again() -> None:
    pages = 5 * 40 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    (asis,), (raised,) = (run_ranks(1, page_faults_of_large_tensors, flag) for flag in (False, True))
    assert raised < pages / 100
    assert asis > 10 * raised


@LINUX
def test_the_summary_of_a_run_says_so_and_a_key_turns_it_off(tiny) -> None:
    said = "malloc keeps freed memory (train.keep_freed_memory)"
    assert said in list(run_summary(Trainer(tiny())))
    assert not [line for line in run_summary(Trainer(tiny("train.keep_freed_memory=false"))) if "malloc" in line]


@LINUX
@pytest.mark.parametrize(("free", "words"), [(1e6, "free memory is 0.0 GiB"), (None, "free memory is unknown")])
def test_thresholds_stay_where_memory_is_short(tiny, host, monkeypatch, free, words) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(memory, "raise_thresholds", lambda: pytest.fail("raised"))
    found = note(tiny, host)
    assert found is not None
    assert found.startswith("malloc as it is: ")
    assert words in found


@pytest.mark.parametrize("elsewhere", [None, ValueError, AttributeError])
def test_nothing_happens_and_nothing_is_said_elsewhere(tiny, host, monkeypatch, elsewhere) -> None:
    """musl returns None, macOS knows no such name, Windows no such function."""

    def confstr(name: str) -> None:
        if elsewhere is not None:
            raise elsewhere(name)

    monkeypatch.setattr(os, "confstr", confstr)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: pytest.fail("called"))
    assert note(tiny, host) is None


def test_what_the_user_or_the_device_decides(tiny, host, monkeypatch) -> None:
    monkeypatch.setattr(memory, "raise_thresholds", lambda: pytest.fail("raised"))
    assert note(tiny, host, device="cuda") is None
    assert has_own_settings({"MALLOC_TRIM_THRESHOLD_": "1"})
    assert has_own_settings({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1"})
    assert not has_own_settings({"GLIBC_TUNABLES": "glibc.cpu.hwcaps=x", "OMP_NUM_THREADS": "1"})
