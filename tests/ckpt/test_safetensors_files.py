"""Tensors in the pages of their file: the same values, nothing written back, errors instead of signals."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mt_ckpt.files import safetensors
from mt_ckpt.files.safetensors import SafetensorsFile, SafetensorsWriter, TensorInfo, map_range, write_safetensors
from mt_core.errors import CheckpointError

TENSORS = {
    "a": torch.arange(5000, dtype=torch.float32).reshape(50, 100),
    "b": torch.arange(7, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(4, dtype=torch.uint8),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.fixture(params=["mapped", "copied"])
def each_way(request, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "copied":  # as on a system that cannot map
        monkeypatch.setattr(safetensors, "map_range", lambda file, offset, length: None)
    return request.param


def test_values(file: Path, each_way: str) -> None:
    opened = SafetensorsFile(file)
    for name, tensor in TENSORS.items():
        found = opened.read(name)
        assert found.dtype == tensor.dtype
        assert found.is_contiguous()
        assert torch.equal(found, tensor)


def test_changing_a_tensor_leaves_the_file(file: Path, each_way: str) -> None:
    opened = SafetensorsFile(file)
    opened.read("a").fill_(-1)
    assert torch.equal(opened.read("a"), TENSORS["a"])
    assert torch.equal(load_file(file)["a"], TENSORS["a"])


def test_a_file_that_was_cut_after_it_was_opened(file: Path, each_way: str) -> None:
    opened = SafetensorsFile(file)
    os.truncate(file, file.stat().st_size - 10_000)
    with pytest.raises(CheckpointError, match="truncated: it ends at byte .*, within tensor a"):
        opened.read("a")


def test_a_tensor_outlives_its_file(file: Path) -> None:
    tensor = SafetensorsFile(file).read("a")
    file.unlink()
    assert torch.equal(tensor, TENSORS["a"])


def test_elements_that_are_not_aligned(tmp_path: Path) -> None:
    """Writers other than ours and the library's may leave a header of any length."""
    header = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert len(header) % 4
    data = torch.tensor([1.5, -2.0]).numpy().tobytes()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert SafetensorsFile(file).read("x").tolist() == [1.5, -2.0]


def test_ranges_anywhere_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "x"
    content = os.urandom(3 * 4096 + 17)
    file.write_bytes(content)
    for offset, length in ((0, 1), (4095, 3), (4096, 4096), (5, len(content) - 5)):
        memory = map_range(file, offset, length)
        assert memory is not None
        assert bytes(memory) == content[offset : offset + length]
    assert map_range(file, 4096, len(content)) is None
    assert map_range(tmp_path / "none", 0, 1) is None


def test_the_disk_begins_before_the_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every so many bytes are synced while others are written, and everything is at the end."""
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    monkeypatch.setattr(safetensors, "SYNC_BYTES", 1 << 20)
    infos = {str(i): TensorInfo((1 << 18,), torch.float32) for i in range(6)}
    write_safetensors(tmp_path / "x", infos, (torch.full((1 << 18,), float(i)) for i in range(6)))
    assert len(synced) == 1 + 6
    assert synced[-1] == (tmp_path / "x").stat().st_size
    assert [load_file(tmp_path / "x")[str(i)][0].item() for i in range(6)] == [0, 1, 2, 3, 4, 5]


def test_a_sync_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the middle, although a later one succeeds: the system tells of lost bytes once."""
    failures = iter([OSError(5, "Input/output error")])

    def fsync(descriptor: int) -> None:
        for error in failures:
            raise error

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(safetensors, "SYNC_BYTES", 1 << 20)
    infos = {str(i): TensorInfo((1 << 18,), torch.float32) for i in range(4)}
    with closing(SafetensorsWriter(tmp_path / "x", infos)) as writer:
        for _ in infos:
            writer.add(torch.zeros(1 << 18))
        with pytest.raises(OSError, match="Input/output error") as raised:
            writer.finish()
    assert raised.value.filename == str(tmp_path / "x")
