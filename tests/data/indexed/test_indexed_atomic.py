"""A data set appears whole or not at all: kills, a full disk, two writers."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.small_process import in_small_process

from mt_core.errors import DataError
from mt_data.indexed import IndexedDataset, IndexedDatasetWriter, verify

SUFFIXES = (".bin", ".idx", ".manifest.json")


def write_many(prefix: Path, value: int = 1, sequences: int = 2000) -> None:
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for number in range(sequences):
            writer.add_sequence(np.full(number % 50 + 1, value, np.int32))
            writer.end_document()
        writer.finish(extra={"value": value})


def forked(function: Callable[..., Any], *arguments: Any) -> int:
    """The id of a process that calls the function; its exit code is 1 when that raises."""
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
            os._exit(0)
        finally:
            os._exit(1)
    return child


def in_child(function: Callable[..., Any], *arguments: Any) -> int:
    """Exit code of a forked process that calls the function."""
    return exit_code(forked(function, *arguments))


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finished(prefix: Path) -> int | None:
    """The value that fills the data set, None when there is none; fails when there is half of one."""
    if not prefix.with_suffix(".idx").exists():
        assert not prefix.with_suffix(".manifest.json").exists()
        return None
    assert verify(prefix).problems == []
    data = IndexedDataset(prefix)
    assert len(data) == 2000
    value = int(data[0][0])
    assert all((ids == value).all() for ids in data)
    manifest = data.manifest()
    assert manifest is None or manifest.extra == {"value": value}
    return value


@pytest.mark.slow
def test_a_kill_at_a_random_moment_leaves_all_or_nothing(tmp_path: Path) -> None:
    in_small_process(kill_writers, tmp_path)


def kill_writers(tmp_path: Path) -> None:
    prefix, generator = tmp_path / "data", random.Random(0)
    begin = time.monotonic()
    assert in_child(write_many, prefix) == 0
    whole = time.monotonic() - begin
    for path in tmp_path.iterdir():
        path.unlink()
    for _ in range(50):
        child = forked(write_many, prefix)
        time.sleep(generator.uniform(0, 1.2 * whole))
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) in (0, -signal.SIGKILL)
        assert finished(prefix) in (None, 1)
    # What the killed ones left is used again, and nothing of it stays.
    write_many(prefix, 2)
    assert finished(prefix) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx", "data.manifest.json"]


def die_at(step: int, prefix: Path) -> None:
    """Write value 2, and die in place of the `step`-th call that changes names or syncs."""
    calls = 0

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    for name in ("replace", "unlink", "fsync"):
        setattr(os, name, dying(getattr(os, name)))
    write_many(prefix, 2)


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True], ids=["new", "over an old one"])
def test_a_kill_at_each_step_of_finishing_mixes_nothing(tmp_path: Path, replaced: bool) -> None:
    in_small_process(kill_at_each_step, tmp_path, replaced)


def kill_at_each_step(tmp_path: Path, replaced: bool) -> None:
    found = []
    for step in range(1, 12):
        prefix = tmp_path / str(step) / "data"
        if replaced:
            write_many(prefix, 1)
        assert in_child(die_at, step, prefix) in (0, -signal.SIGKILL)
        found.append(finished(prefix))
    # fsync of three files, unlink of two names, fsync of the folder, rename of three files, fsync of the folder.
    before = 1 if replaced else None
    assert found[:4] == [before] * 4
    assert found[4:8] == [before, None, None, None] if replaced else [None] * 4
    assert found[8:] == [2, 2, 2]


def write_with_little_room(limit: int, prefix: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        write_many(prefix)
    except DataError as error:
        message = f"{prefix} cannot be written: File too large; nothing is left of it"
        os._exit(7 if message in str(error) else 8)


# .bin has about 200 kB, which is less than its buffer, .idx 40 kB: the last one fails in `finish`.
@pytest.mark.parametrize("limit", [0, 10_000, 150_000])
def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path, limit: int) -> None:
    assert in_child(write_with_little_room, limit, tmp_path / "data") == 7
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_appending_leaves_nothing_of_the_new_one(tmp_path: Path) -> None:
    write_many(tmp_path / "source")
    before = sorted(path.name for path in tmp_path.iterdir())

    def append() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            with IndexedDatasetWriter(tmp_path / "data", np.int32) as writer:
                for _ in range(20):
                    writer.append(tmp_path / "source")
        except DataError:
            os._exit(7)

    assert in_child(append) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_failing_disk_while_spooling_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = IndexedDatasetWriter(tmp_path / "data", np.uint8)

    def full(data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer._lengths._file, "write", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        writer.add_document([1], [1])
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_block_takes_everything_back(tmp_path: Path) -> None:
    def interrupted() -> None:
        with IndexedDatasetWriter(tmp_path / "data", np.uint8) as writer:
            writer.add_document([1], [1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_ends_without_finish_takes_everything_back(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", np.uint8) as writer:
        writer.add_document([1], [1])
    assert list(tmp_path.iterdir()) == []


def test_an_aborted_writer_keeps_the_old_data_set(tmp_path: Path) -> None:
    write_many(tmp_path / "data")
    with IndexedDatasetWriter(tmp_path / "data", np.int32) as writer:
        writer.add_document([1], [1])
    assert finished(tmp_path / "data") == 1


def test_two_writers_of_one_name_do_not_mix(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", np.int32) as first:
        with pytest.raises(DataError, match=r"another process is writing .*data\.bin .*data\.bin\.tmp is locked"):
            IndexedDatasetWriter(tmp_path / "data", np.int32)
        first.add_document([5], [1])
        first.finish()
    write_many(tmp_path / "data", 3)
    assert finished(tmp_path / "data") == 3


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file/data cannot be written: "):
        IndexedDatasetWriter(tmp_path / "file" / "data", np.uint8)
    with pytest.raises(DataError, match="copy them to the store"):
        IndexedDatasetWriter("memory://bucket/data", np.uint8)
