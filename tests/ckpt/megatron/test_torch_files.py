"""Files of torch.save: what torch writes is read, what is written torch reads."""

from __future__ import annotations

import argparse
import pickle
import random
import struct
from pathlib import Path

import pytest
import torch

from mt_ckpt.pickles.encode import OrderedItems, namespace
from mt_ckpt.pickles.torch_file import TorchWriter, open_torch_file, tensors_in
from mt_core.errors import CheckpointError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(60).view(5, 12)
    return {
        **{str(dtype): (base % 2).to(dtype) for dtype in DTYPES},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "transposed": base.float().T,
        "strided": base.float()[1::2, ::3],
        "row": base[2],
        "parameter": torch.nn.Parameter(base.double()),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "float8": (base % 7).float().to(torch.float8_e4m3fn),
    }


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of a tensor's elements, in order."""
    return list(tensor.detach().contiguous().flatten().view(torch.uint8))


@pytest.mark.parametrize("archive", [True, False])
def test_every_kind_of_tensor_that_torch_saves(archive, tmp_path) -> None:
    saved = {name: value for name, value in tensors().items() if archive or name != "float8"}
    torch.save({"inner": saved, "shared": [saved["row"]]}, tmp_path / "a.pt", _use_new_zipfile_serialization=archive)
    found = tensors_in(open_torch_file(tmp_path / "a.pt").value["inner"])
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        read = found[name].read()
        assert read.is_contiguous()
        assert read.dtype == value.dtype
        assert read.shape == value.shape
        assert bits(read) == bits(value)


def test_parts_of_tensors(tmp_path) -> None:
    value = torch.arange(60.0).view(5, 12)
    torch.save({"a": value, "t": value.T}, tmp_path / "a.pt")
    found = open_torch_file(tmp_path / "a.pt").value
    assert torch.equal(found["a"].read_flat(7, 9), value.flatten()[7:16])
    assert torch.equal(found["t"].read_flat(7, 9), value.T.flatten()[7:16])


def test_parts_of_a_damaged_storage(tmp_path) -> None:
    """Also where the changed byte is in none of the parts: the file's checksum is of the whole storage."""
    torch.save({"a": torch.full((500,), 7.25)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(struct.pack("<500f", *[7.25] * 500)) + 1999] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    found = open_torch_file(tmp_path / "a.pt").value
    with pytest.raises(CheckpointError, match="damaged: the checksum of the 2000 bytes"):
        found["a"].read_flat(7, 9)


def test_a_file_without_checksums(tmp_path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(9)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(open_torch_file(tmp_path / "a.pt").value["a"].read(), torch.arange(9))


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_written_is_what_torch_reads(mapped, tmp_path) -> None:
    file, writable = tmp_path / "a.pt", {str(dtype): (torch.arange(60) % 2).to(dtype) for dtype in DTYPES}
    writable |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "transposed": torch.arange(6.0).view(2, 3).T}
    plain = {
        "int": -5,
        "long": 2**40,
        "float": 1.5,
        "none": None,
        "text": "äöü\n",
        "tuple": (1, (2,)),
        "list": [[]],
    }
    with file.open("wb") as stream:
        writer = TorchWriter(stream, "a")
        encoded = {name: writer.add(tensor) for name, tensor in writable.items()}
        writer.finish({"t": OrderedItems(encoded), "args": namespace({"dtype": torch.bfloat16, **plain}), **plain})
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(file, weights_only=True, mmap=mapped)
    assert {name: found[name] for name in plain} == plain
    assert vars(found["args"]) == {"dtype": torch.bfloat16, **plain}
    again = open_torch_file(file)
    for name, tensor in writable.items():
        assert torch.equal(found["t"][name], tensor), name
        assert found["t"][name].dtype == tensor.dtype, name
        assert torch.equal(again.value["t"][name].read(), tensor), name
    assert all(extent.offset % 64 == 0 for extent in again.storages.values())


def read_or_error(file: Path) -> torch.Tensor | str:
    try:
        return open_torch_file(file).value["a"].read()
    except CheckpointError as error:
        return str(error)


def test_a_flipped_byte_is_noticed(tmp_path) -> None:
    """Either the value is the same (a byte of padding), or the error names the file."""
    file, value = tmp_path / "a.pt", torch.arange(100.0)
    torch.save({"a": value}, file)
    data = file.read_bytes()
    (stored,) = tensors_in(open_torch_file(file).value).values()
    choose = random.Random(1)
    elsewhere = [choose.randrange(len(data)) for _ in range(300)]
    inside = [stored.extent.offset, stored.extent.offset + 399]
    for place in [*inside, *elsewhere]:
        file.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        found = read_or_error(file)
        if isinstance(found, str):
            assert str(file) in found
        else:
            assert place not in inside
            assert torch.equal(found, value)


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"text\.pt: "):
        open_torch_file(tmp_path / "text.pt")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        open_torch_file(tmp_path / "none.pt")


@pytest.mark.parametrize("keys", [7, None, [["0"]]])
def test_storages_that_are_not_listed_by_their_keys(keys, tmp_path: Path) -> None:
    """In the layout before torch 1.6, where the list is the fifth pickle."""
    system = {"little_endian": True}
    parts = (0x1950A86A20F9469CFC6C, 1001, system, {"a": 1}, keys)
    (tmp_path / "a.pt").write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in parts))
    with pytest.raises(CheckpointError, match=r"a\.pt: .*damaged: "):
        open_torch_file(tmp_path / "a.pt")


@pytest.mark.parametrize("pieces", [[(3,)], [(2, 2), (0,), (5,), ()]])
def test_a_flat_tensor_that_comes_in_pieces(pieces, tmp_path) -> None:
    """Read by torch, by zipfile, which checks the sums behind the data, and by our own reader."""
    import zipfile

    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=generator) for shape in pieces]
    file = tmp_path / "flat.pt"
    with file.open("wb") as stream:
        writer = TorchWriter(stream, "flat")
        flat = writer.begin_flat(torch.float32, sum(part.numel() for part in parts))
        for part in parts:
            flat.write(part)
        writer.finish({"flat": flat.finish(), "after": writer.add(torch.arange(3))})
    expected = torch.cat([part.flatten() for part in parts])
    assert zipfile.ZipFile(file).testzip() is None
    for mmap in (False, True):
        assert torch.equal(torch.load(file, weights_only=True, mmap=mmap)["flat"], expected)
    assert torch.equal(open_torch_file(file).value["flat"].read(), expected)
    assert torch.equal(open_torch_file(file).value["after"].read(), torch.arange(3))
