"""The cache of indices: found again, damage, several jobs at once, nowhere to write."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import numpy as np
import pytest

from mt_data.datasets.cache import IndexCache

KEY = {"kind": "test", "data": "abc", "sizes": [1, 2]}
EXPECTED = {"rows": np.arange(1000, dtype=np.int32).reshape(-1, 2), "order": np.zeros(0, np.uint32)}


class Counted:
    """Builds EXPECTED and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return dict(EXPECTED)


def check(arrays: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == EXPECTED.keys()
    for name, array in EXPECTED.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype


def test_built_once_then_read(tmp_path: Path) -> None:
    build = Counted()
    for _ in range(3):
        check(IndexCache(tmp_path / "cache").get(KEY, build))
    assert build.calls == 1
    check(IndexCache(tmp_path / "cache").get(KEY | {"data": "abd"}, build))
    assert build.calls == 2
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.is_dir()]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a byte flipped": lambda entry: flip_a_byte(entry / "rows.npy"),
    "cut short": lambda entry: (entry / "rows.npy").write_bytes((entry / "rows.npy").read_bytes()[:-8]),
    "emptied": lambda entry: (entry / "rows.npy").write_bytes(b""),
    "an array gone": lambda entry: (entry / "rows.npy").unlink(),
    "no manifest": lambda entry: (entry / "manifest.json").unlink(),
    "half a manifest": lambda entry: (entry / "manifest.json").write_text('{"rows": '),
    "another manifest": lambda entry: (entry / "manifest.json").write_text('["rows"]'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_reported_and_built_again(
    damage: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build = Counted()
    IndexCache(tmp_path).get(KEY, build)
    (entry,) = tmp_path.iterdir()
    damage(entry)
    check(IndexCache(tmp_path).get(KEY, build))
    assert build.calls == 2
    assert any("damaged" in record.message and str(entry) in record.message for record in caplog.records)
    caplog.clear()
    check(IndexCache(tmp_path).get(KEY, build))
    assert (build.calls, caplog.records) == (2, [])
    assert list(tmp_path.iterdir()) == [entry]


@pytest.mark.parametrize("directory", [None, "file/cache", "file"])
def test_nowhere_to_write_builds_in_memory(
    directory: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    build = Counted()
    check(IndexCache(directory and tmp_path / directory).get(KEY, build))
    assert build.calls == 1
    assert ("stays in memory" in caplog.text) == (directory is not None)


def test_a_full_disk_builds_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    build = Counted()
    check(IndexCache(tmp_path).get(KEY, build))
    assert build.calls == 1
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_an_error_of_the_builder_is_passed_on(tmp_path: Path) -> None:
    def fails() -> dict[str, np.ndarray]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        IndexCache(tmp_path).get(KEY, fails)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


SECONDS = 120


def job(directory: Path, barrier: Barrier, locks: bool, until: Event | None = None) -> None:
    """Both jobs begin at the barrier. until: what building waits for."""
    if not locks:
        import fcntl

        def refuses(*args: object) -> None:
            raise OSError(95, "Operation not supported")

        fcntl.flock = refuses  # type: ignore[assignment]

    def build() -> dict[str, np.ndarray]:
        with (directory / "builds").open("a") as file:
            file.write("x")
        if until is None:
            time.sleep(0.2)
        else:
            assert until.wait(SECONDS)
        return dict(EXPECTED)

    barrier.wait()
    check(IndexCache(directory / "cache").get(KEY, build))


@pytest.mark.parametrize("locks", [True, False], ids=["with locks", "without locks"])
def test_two_jobs_at_once(locks: bool, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    jobs = [context.Process(target=job, args=(tmp_path, barrier, locks)) for _ in range(2)]
    for process in jobs:
        process.start()
    for process in jobs:
        process.join(SECONDS)
    assert [process.exitcode for process in jobs] == [0, 0]
    if locks:
        assert (tmp_path / "builds").read_text() == "x"
    entries = [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    assert len(entries) == 1
    check(IndexCache(tmp_path / "cache").get(KEY, Counted()))


def test_what_a_killed_job_began_goes_after_a_day(tmp_path: Path) -> None:
    IndexCache(tmp_path).get(KEY, Counted())
    (entry,) = tmp_path.iterdir()
    shutil.rmtree(entry)
    old, young = tmp_path / f"{entry.name}.tmp-old", tmp_path / f"{entry.name}.tmp-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "rows.npy").write_bytes(b"half")
        for path in (folder / "rows.npy", folder):
            os.utime(path, (0, 0))
    os.utime(young / "rows.npy")  # a job that is still at work
    check(IndexCache(tmp_path).get(KEY, Counted()))
    assert sorted(tmp_path.iterdir()) == [entry, young]


def test_waiting_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job builds until this one has reported that it waits."""
    caplog.set_level(logging.INFO)
    context = multiprocessing.get_context("fork")
    barrier, waiting = context.Barrier(2), context.Event()

    def notice(record: logging.LogRecord) -> bool:
        if "waiting for another job" in record.getMessage():
            waiting.set()
        return True

    monkeypatch.setattr(caplog.handler, "filters", [notice])
    other = context.Process(target=job, args=(tmp_path, barrier, True, waiting))
    other.start()
    barrier.wait()
    while not (tmp_path / "builds").exists():
        time.sleep(0.005)
    build = Counted()
    check(IndexCache(tmp_path / "cache").get(KEY, build))
    other.join(SECONDS)
    assert build.calls == 0
    assert "waiting for another job" in caplog.text
