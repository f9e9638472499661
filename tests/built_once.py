"""Folders that take seconds to make, made once in a run: pytest-xdist gives tests of one module to several workers, and
each would set up the module's fixtures."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def built_once(request: pytest.FixtureRequest, name: str, build: Callable[[Path], object]) -> Path:
    """A copy, for this worker alone, of the folder that `build` fills, which one worker calls while others wait.

    name: the same in all modules that share the folder. build: with paths relative to the folder, so that what it
    writes is valid in a copy.
    """
    temporary = request.getfixturevalue("tmp_path_factory")
    original = _folder_of_run(request.config, temporary) / "built_once" / name
    original.parent.mkdir(exist_ok=True)
    complete = original.with_name(f"{name}.complete")
    with _locked(original.with_name(f"{name}.lock")):
        if not complete.exists():
            shutil.rmtree(original, ignore_errors=True)  # of a build that failed
            original.mkdir()
            build(original)
            complete.touch()
    return Path(shutil.copytree(original, temporary.mktemp(name) / name, symlinks=True))


def _folder_of_run(config: pytest.Config, temporary: pytest.TempPathFactory) -> Path:
    """A worker's own temporary folder is in that of the run."""
    base = temporary.getbasetemp()
    return base.parent if hasattr(config, "workerinput") else base


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also where a process forked meanwhile has the file open
