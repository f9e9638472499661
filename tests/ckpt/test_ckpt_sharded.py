"""Checkpoints that several ranks write together, on a file system and in an object store."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.small_process import in_small_process

from mt_ckpt.native.manifest import detect, read_manifest
from mt_ckpt.native.read import find_damage, open_checkpoint
from mt_ckpt.native.save import ShardedSave, save_checkpoint
from mt_ckpt.native.storage_backends import RemotePlace
from mt_core import retention
from mt_core.checkpoint_specs import Fragment
from mt_core.errors import CheckpointError, ConfigError
from mt_core.paths import as_path
from mt_core.tensor_slice import TensorSlice
from mt_core.train.checkpoint.run_directory import RunDirectory

MATRIX = torch.arange(35.0).reshape(5, 7)
TENSORS = {"model.matrix": MATRIX, "model.vector": torch.arange(3).to(torch.bfloat16), "step": torch.tensor(4)}


def piece(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Fragment:
    tensor, tensor_slice = TENSORS[name], TensorSlice(start, shape)
    return Fragment(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        tensor_slice=tensor_slice,
        tensor=lambda: tensor[tensor_slice.slices],
    )


SHARES = [
    [piece("model.matrix", (0, 0), (2, 7)), piece("step", (), ())],
    [piece("model.matrix", (2, 0), (3, 4)), piece("model.vector", (0,), (3,))],
    [piece("model.matrix", (2, 4), (3, 3))],
]


def write(path: Path, shares=SHARES, metadata=None) -> None:
    """All ranks, each in a thread, as their processes would."""
    savers = [ShardedSave() for _ in shares]
    place = savers[0].begin(path)
    with ThreadPoolExecutor(len(shares)) as threads:
        done = [
            threads.submit(
                saver.write, path, place, rank, len(shares), fragments, metadata or {"iteration": 3}, {"a.txt": b"text"}
            )
            for rank, (saver, fragments) in enumerate(zip(savers, shares, strict=True))
        ]
        for future in done:
            future.result()


@pytest.fixture(params=["local", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A local directory, and one that is reached through fsspec."""
    return tmp_path if request.param == "local" else as_path(f"file://{tmp_path}")


def assert_whole(path: Path) -> None:
    reader = open_checkpoint(path)
    assert reader.shapes() == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    for name, tensor in TENSORS.items():
        assert torch.equal(reader.read(name), tensor)
        assert reader.read(name).dtype == tensor.dtype
    assert reader.metadata == {"iteration": 3}
    assert reader.files() == {"a.txt": b"text"}
    assert find_damage(path, reader.manifest) == []


def test_pieces_of_all_ranks_are_one_checkpoint(folder: Path) -> None:
    path = folder / "iter_0000003"
    write(path)
    assert_whole(path)
    ranks = {piece.shard.partition("rank-")[2][:5] for piece in read_manifest(path).tensors["model.matrix"].pieces}
    assert ranks == {"00000", "00001", "00002"}
    assert {entry.name for entry in folder.iterdir()} == {"iter_0000003"}
    assert not list(path.glob(".*"))


def test_each_file_is_one_of_safetensors(tmp_path: Path) -> None:
    write(tmp_path / "c")
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "c").glob("*.safetensors"):
        found |= load_file(file)
    assert set(found) == {"model.matrix@0,0", "model.matrix@2,0", "model.matrix@2,4", "model.vector", "step"}
    assert torch.equal(found["model.matrix@2,4"], MATRIX[2:, 4:])


@pytest.mark.parametrize("seed", range(20))
def test_any_boxes_can_be_read(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.getbasetemp() / "slices" / "c"
    if not path.exists():
        write(path)
    draw = random.Random(seed)
    slices = []
    for _ in range(3):
        start = draw.randint(0, 4), draw.randint(0, 6)
        slices.append(TensorSlice(start, (draw.randint(0, 5 - start[0]), draw.randint(0, 7 - start[1]))))
    reader = open_checkpoint(path)
    for tensor_slice, found in zip(slices, reader.read_slices("model.matrix", slices), strict=True):
        assert torch.equal(found, MATRIX[tensor_slice.slices])
        assert found.is_contiguous()


def test_only_the_pieces_that_are_needed_are_read(tmp_path: Path) -> None:
    write(tmp_path / "c")
    reader = open_checkpoint(tmp_path / "c")
    for stored in reader.manifest.tensors["model.matrix"].pieces:
        if stored.start != (2, 4):
            (tmp_path / "c" / stored.shard).unlink()
    (found,) = reader.read_slices("model.matrix", [TensorSlice((3, 5), (2, 2))])
    assert torch.equal(found, MATRIX[3:, 5:])
    with pytest.raises(CheckpointError, match="rank-0000"):
        reader.read("model.matrix")


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write(path)
    pieces = open_checkpoint(path).manifest.tensors["model.matrix"].pieces
    for stored in pieces:
        file = path / stored.shard
        original = file.read_bytes()
        for offset in (0, 9, stored.offset, len(original) - 1):
            damaged = bytearray(original)
            damaged[offset] ^= 1
            file.write_bytes(damaged)
            assert any(stored.shard in problem for problem in find_damage(path, read_manifest(path)))
            with pytest.raises(CheckpointError, match=stored.shard):
                list(map(open_checkpoint(path).read, TENSORS))
        file.write_bytes(original)


class Breaks:
    """Fragments of which the second cannot be written."""

    def __iter__(self) -> Iterator[Fragment]:
        yield SHARES[1][0]
        raise CheckpointError("the disk of rank 1 is full")


def test_a_report_counts_when_all_of_it_is_there(tmp_path: Path) -> None:
    """Stores that cannot rename may show a file while it is written."""
    place = RemotePlace(as_path(f"file://{tmp_path}") / "c", "token")
    place.report(1, b'{"error": null}')
    (file,) = (tmp_path / "c" / ".reports").iterdir()
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert place.reports() == {}
    file.write_bytes(whole)
    assert place.reports() == {1: b'{"error": null}'}
    place.close()


def test_a_rank_that_fails_is_named_and_nothing_appears(folder: Path) -> None:
    path = folder / "c"
    with pytest.raises(CheckpointError, match="rank 1 could not write its share: the disk of rank 1 is full"):
        write(path, [SHARES[0], Breaks(), SHARES[2]])
    assert not detect(path)
    write(path)
    assert_whole(path)
    assert {entry.name for entry in folder.iterdir()} == {"c"}


def test_what_was_there_before_is_replaced(folder: Path) -> None:
    path = folder / "c"
    save_checkpoint(path, [("model.other", torch.ones(9))], {"iteration": 1}, {})
    write(path)
    assert_whole(path)
    shards = {file.name for file in path.iterdir() if file.name.endswith(".safetensors")}
    assert shards == set(read_manifest(path).shards)


def test_whole_tensors_in_an_object_store(tmp_path: Path) -> None:
    path = as_path(f"file://{tmp_path}") / "c"
    save_checkpoint(path, TENSORS.items(), {"iteration": 3}, {"a.txt": b"text"}, max_shard_bytes=64)
    assert_whole(path)
    assert len([file for file in (tmp_path / "c").iterdir() if file.name.endswith(".safetensors")]) >= 3


def test_an_attempt_that_was_killed_is_no_checkpoint_and_is_cleaned_up(folder: Path) -> None:
    path = folder / "c"
    saver = ShardedSave()
    place = saver.begin(path)
    ShardedSave().write(path, place, 1, 2, SHARES[1], {}, {})
    assert not detect(path)
    saver._begun.pop(place).close()
    write(path)
    assert_whole(path)
    assert all(
        stored.name in {"manifest.json", "metadata.json", "files"} or stored.name in read_manifest(path).shards
        for stored in path.iterdir()
    )


def test_the_first_rank_waits_for_the_slowest(tmp_path: Path) -> None:
    saver = ShardedSave()
    path = tmp_path / "c"
    place = saver.begin(path)
    first = threading.Thread(
        target=saver.write, args=(path, place, 0, 3, SHARES[0], {"iteration": 3}, {"a.txt": b"text"})
    )
    first.start()
    ShardedSave().write(path, place, 2, 3, SHARES[2], {}, {})
    time.sleep(0.1)
    assert first.is_alive()
    assert not path.exists()
    ShardedSave().write(path, place, 1, 3, SHARES[1], {}, {})
    first.join(60)
    assert_whole(path)


def test_a_full_disk_is_named_by_the_rank_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def full(descriptor: int, data: memoryview, position: int) -> int:
        if "rank-00002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"rank 2 could not write its share: .*No space left on device"):
        write(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere://bucket/run: nowhere:// cannot be used"):
        as_path("nowhere://bucket/run")


@pytest.mark.slow
@pytest.mark.parametrize("tries", [24, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_killed_at_random_moments(tmp_path: Path, tries: int) -> None:
    """Three ranks save one step after the other until the process dies; what `latest` names is always whole."""
    in_small_process(kill_at_random_moments, tmp_path, tries)


def kill_at_random_moments(tmp_path: Path, tries: int) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    moments = random.Random(7)
    latest = None
    for number in range(1, tries + 1):
        kill_while_saving(directory, 1000 * number, moments.uniform(0, 0.05))
        latest = directory.latest_checkpoint()
        assert latest is not None
        assert retention.iteration_of(latest) >= 1000 * number
        assert_whole(latest)
    write(directory.checkpoint(1000 * tries + 999))
    assert not [entry.name for entry in directory.checkpoints.iterdir() if entry.name.startswith(".tmp-mt-")]


def kill_while_saving(directory: RunDirectory, first: int, seconds: float) -> None:
    """In a forked process, which is killed some time after its first commit."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for iteration in count(first):
                write(directory.checkpoint(iteration))
                directory.set_latest(directory.checkpoint(iteration))
                os.write(write_end, b".")
        finally:
            os._exit(1)
    os.close(write_end)
    heard = os.read(read_end, 1)
    os.close(read_end)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert heard
