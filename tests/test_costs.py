"""The count of CPU seconds outlives processes that end while it looks at them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.costs import _children, cpu_seconds


def test_children_of_a_process_are_listed_while_it_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in _children(os.getpid())
    assert child.pid not in _children(os.getpid())


def test_a_process_that_ends_while_its_threads_are_listed_has_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(folder: Path, pattern: str) -> Iterator[Path]:
        raise FileNotFoundError(2, "No such file or directory", str(folder))

    monkeypatch.setattr(Path, "glob", ended)
    assert _children(os.getpid()) == []
    assert cpu_seconds() > 0
