"""Saving that is killed or fails at any moment leaves whole checkpoints only."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.conftest import Kit
from tests.small_process import in_small_process

from mt_ckpt.files import staging
from mt_ckpt.native.save import save_checkpoint
from mt_core.errors import CheckpointError

SYSTEM_CALLS = ("open", "mkdir", "pwrite", "fsync", "rename", "unlink", "rmdir")


def visible(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


def count_calls(event: Callable[[int], Any], patch: Callable[[str, Any], None]) -> None:
    """Call `event(n)` before the n-th call into the operating system that changes a disk."""
    number = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            number += 1
            event(number)
            return call(*args, **kwargs)

        return wrapper

    for name in SYSTEM_CALLS:
        patch(name, counted(getattr(os, name)))


def die_at(call: int) -> None:
    """Kill this process with SIGKILL before its `call`-th system call."""
    count_calls(lambda n: n == call and os.kill(os.getpid(), signal.SIGKILL), lambda name, f: setattr(os, name, f))


def kill_at_every_call(work: Callable[[], object], in_child: Callable[..., int]) -> Iterator[int]:
    """Runs `work` in children, the first killed before its first system call, the next before its second, ..."""
    call = 0
    code = -signal.SIGKILL
    while code == -signal.SIGKILL:
        call += 1
        code = in_child(lambda number=call: (die_at(number), work()))
        yield call
    assert code == 0


@pytest.mark.slow
def test_killed_before_each_system_call(saved: Path) -> None:
    in_small_process(kill_saves, saved)


def kill_saves(saved: Path) -> None:
    """Of one that replaces a checkpoint, and of one beside it."""
    kit, calls = Kit(), 0
    for path in (saved, saved.with_name("iter_0000002")):
        for _ in kill_at_every_call(lambda path=path: kit.save(path, 2), kit.in_child):
            assert kit.assert_whole(saved) in (1, 2)
            if path != saved and path.exists():
                assert kit.assert_whole(path) == 2
                shutil.rmtree(path)
            assert set(visible(saved.parent)) <= {saved.name, path.name}
            calls += 1
            if calls % 10 == 0:
                kit.save(saved, 1)
    assert calls > 60
    kit.save(saved, 1)
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.slow
def test_killed_where_directories_cannot_be_exchanged(saved: Path) -> None:
    """Without an atomic exchange the old directory is moved aside first; the next save finishes what was begun."""
    in_small_process(kill_saves_without_exchange, saved)


def kill_saves_without_exchange(saved: Path) -> None:
    kit, staging._exchange = Kit(), lambda first, second: False
    moments_without = 0
    for _ in kill_at_every_call(lambda: kit.save(saved, 2), kit.in_child):
        moments_without += not saved.exists()
        staging.remove_leftovers(saved.parent)
        assert os.listdir(saved.parent) == [saved.name]
        kit.assert_whole(saved)
    assert moments_without > 0


@pytest.mark.slow
def test_killed_at_random_moments(saved: Path) -> None:
    in_small_process(kill_at_random_moments, saved)


def kill_at_random_moments(saved: Path) -> None:
    kit, moments = Kit(), random.Random(0)

    def save_on_and_on() -> None:
        while True:
            for number in (1, 2):
                kit.save(saved.with_name(f"iter_000000{number}"), number)

    for _ in range(16):
        assert kit.in_child(save_on_and_on, kill_after=moments.uniform(0, 0.08)) == -signal.SIGKILL
        assert kit.assert_whole(saved) == 1
        for name in visible(saved.parent):
            kit.assert_whole(saved.with_name(name))


def test_the_staging_of_a_living_process_is_left_alone(saved: Path, kit, tmp_path: Path) -> None:
    other = staging.Staging(saved.with_name("iter_0000009"))
    try:
        (other.content / "shard").write_bytes(b"half")
        kit.save(saved, 2)
        assert (other.content / "shard").read_bytes() == b"half"
    finally:
        other.close()
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize("moment", ["tempfile.mkdtemp", "fcntl.flock"])
def test_a_new_staging_that_another_process_takes_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It is removed when it has been made, or when its lock file is open but not yet locked."""
    module, _, name = moment.partition(".")
    real, removals = getattr(getattr(staging, module), name), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs) if name == "mkdtemp" else None
        if not removals:
            removals.append(True)
            staging.remove_leftovers(tmp_path)
        return made if name == "mkdtemp" else real(*args, **kwargs)

    monkeypatch.setattr(f"{staging.__name__}.{moment}", interrupted)
    new = staging.Staging(tmp_path / "iter_0000001")
    monkeypatch.undo()
    assert removals
    assert new.content.is_dir()
    staging.remove_leftovers(tmp_path)
    assert new.content.is_dir()
    new.close()
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the files of descriptors in /proc")
@pytest.mark.parametrize("exchange", [True, False])
def test_everything_is_synced_before_it_is_renamed(
    saved: Path, kit, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """What a power failure would need: each file after its last write, each directory, then the name."""
    events: list[tuple[str, str, int]] = []

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(descriptor: int, *args: Any) -> Any:
            result = call(descriptor, *args)
            file = os.readlink(f"/proc/self/fd/{descriptor}")
            events.append((name, file, os.fstat(descriptor).st_size))
            return result

        return wrapper

    def renamed(first: Path, second: Path) -> bool:
        events.append(("exchange", str(second), 0))
        return exchange and real_exchange(first, second)

    real_exchange = staging._exchange
    monkeypatch.setattr(staging, "_exchange", renamed)
    for name in ("pwrite", "fsync"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    kit.save(saved, 2)

    rename = events.index(("exchange", str(saved), 0))
    assert ("fsync", str(saved.parent)) in [event[:2] for event in events[rename:]]
    before = events[:rename]
    content = next(file for name, file, _ in before if file.endswith("/content"))
    for entry in [saved, *saved.rglob("*")]:
        staged = str(content / entry.relative_to(saved))
        last = [event for event in before if event[1] == staged][-1]
        assert last[0] == "fsync"
        assert entry.is_dir() or last[2] == entry.stat().st_size


# -- errors -----------------------------------------------------------------------------------------


def assert_untouched(path: Path, kit) -> None:
    assert kit.assert_whole(path) == 1
    assert os.listdir(path.parent) == [path.name]


def test_file_size_limit(saved: Path, kit, capfd: pytest.CaptureFixture[str]) -> None:
    """The operating system's own refusal, met in the middle of a shard."""

    def save_within_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        kit.save(saved.with_name("iter_0000002"), 2)

    assert kit.in_child(save_within_limit) == 1
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert "CheckpointError" in message
    assert f"{saved.with_name('iter_0000002')}: not saved: File too large" in message
    assert "tensors-00001.safetensors); at least 64.0 KiB more needed" in message
    assert "free on the disk" in message
    assert "checkpoints saved before are untouched; raise the limit on the size of a file (ulimit -f)" in message
    assert_untouched(saved, kit)


def fail_at(call: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, but out of space at its `call`-th call."""
    calls = iter(range(1, 10_000))

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("name", ["iter_0000001", "iter_0000002"])
@pytest.mark.parametrize("function", ["pwrite", "fsync", "mkdir"])
def test_no_space_left(saved: Path, kit, monkeypatch: pytest.MonkeyPatch, function: str, name: str) -> None:
    """Each call of the function fails once; a file system with delayed allocation may tell only at fsync."""
    path = saved.with_name(name)
    committed = False
    refused = 0
    while not committed:
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fail_at(refused + 1, getattr(os, function)))
            try:
                kit.save(path, 2)
                break
            except CheckpointError as error:
                message = str(error)
        refused += 1
        committed = path.exists() and kit.assert_whole(path) == 2  # only the last fsync comes after the rename
        assert f"{name}: not saved: No space left on device" in message
        assert "free on the disk" in message
        if not committed:
            assert_untouched(saved, kit)
    assert refused > 1
    assert kit.assert_whole(path) == 2
    assert visible(saved.parent) == sorted({saved.name, name})


def test_read_only_directory(kit, capfd: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kit.save(folder / "iter_0000001", 1)
        folder.chmod(0o555)

        def save_without_rights() -> None:
            if os.geteuid() == 0:  # root may write everywhere
                os.seteuid(65534)
            kit.save(folder / "iter_0000002", 2)

        assert kit.in_child(save_without_rights) == 1
        folder.chmod(0o755)
        message = capfd.readouterr().err.strip().splitlines()[-1]
        assert "iter_0000002: not saved: Permission denied" in message
        assert "make the directory writable or choose another run directory" in message
        assert_untouched(folder / "iter_0000001", kit)


def test_an_error_of_the_source_is_not_ours(saved: Path, kit) -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(3)
        raise OSError(errno.EIO, "the source failed")

    with pytest.raises(OSError, match="the source failed"):
        save_checkpoint(saved, source(), {}, {})
    assert_untouched(saved, kit)


def test_only_checkpoints_and_empty_directories_are_replaced(tmp_path: Path, kit) -> None:
    (tmp_path / "empty").mkdir()
    kit.save(tmp_path / "empty", 1)
    kit.save(tmp_path / "empty", 2)
    assert kit.assert_whole(tmp_path / "empty") == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose")
    (tmp_path / "file").write_text("do not lose")
    for name in ("mine", "file"):
        with pytest.raises(CheckpointError, match=f"{name}: exists and is not an mt checkpoint"):
            kit.save(tmp_path / name, 1)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "do not lose"
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "mine"]
