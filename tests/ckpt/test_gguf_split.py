"""Models in several GGUF files, written here by the format's description."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.ckpt.convert_cases import LLAMA
from tests.ckpt.test_convert_gguf import to_gguf, write

from mt_ckpt.convert import convert
from mt_ckpt.gguf.file import GGUFFile
from mt_ckpt.gguf.reader import detect
from mt_ckpt.gguf.reader import open_checkpoint as open_gguf
from mt_core.errors import CheckpointError


@pytest.fixture
def whole(make_model, host, tmp_path: Path) -> Path:
    convert(make_model(**LLAMA), tmp_path / "hf", saver="hf", host=host)
    return to_gguf(tmp_path / "hf", tmp_path / "whole" / "m.gguf", "llama", LLAMA, {})


def split(file: Path, folder: Path, count: int, **said: int) -> list[Path]:
    """The file in parts, of which the first has the metadata, every one tensors that follow one another."""
    read = GGUFFile(file)
    names = list(read.tensors)
    parts = []
    for number in range(count):
        keys = {"split.no": number, "split.count": count, "split.tensors.count": len(names), **said}
        own = names[len(names) * number // count : len(names) * (number + 1) // count]
        tensors = {n: ("F32", read.tensors[n].shape, read.read(n).float().numpy().tobytes()) for n in own}
        values = {**(read.metadata if number == 0 else {}), **keys}
        parts.append(write(folder / f"m-{number + 1:05d}-of-{count:05d}.gguf", values, tensors))
    return parts


def test_parts_are_the_model(whole, host, tmp_path: Path) -> None:
    """Named by the folder or by any of the parts."""
    parts, expected = split(whole, tmp_path / "parts", 3), open_gguf(whole, host)
    assert detect(tmp_path / "parts")
    for path in (tmp_path / "parts", parts[0], parts[2]):
        found = open_gguf(path, host)
        assert found.shapes() == expected.shapes()
        for name in expected.shapes():
            assert torch.equal(found.read(name).float(), expected.read(name).float()), name


def test_two_models_in_a_folder_are_none(whole, tmp_path: Path) -> None:
    parts = split(whole, tmp_path / "parts", 2)
    write(parts[0].with_name("other.gguf"), {}, {})
    assert not detect(tmp_path / "parts")
    assert detect(parts[1])


def test_parts_that_are_missing_or_of_another_model_are_named(whole, host, tmp_path: Path) -> None:
    parts = split(whole, tmp_path / "missing", 3)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"3 files, of which m-00002-of-00003.gguf is missing"):
        open_gguf(parts[0], host)
    parts = split(whole, tmp_path / "swapped", 2)
    parts[0].rename(parts[0].with_name("x"))
    parts[1].rename(parts[0])
    parts[0].with_name("x").rename(parts[1])
    with pytest.raises(CheckpointError, match=r"split.no=1 and split.count=2; its name says 0 and 2"):
        open_gguf(parts[0], host)
    parts = split(whole, tmp_path / "fewer", 2, **{"split.tensors.count": 99})
    with pytest.raises(CheckpointError, match=r"split.tensors.count=99, and its parts have"):
        open_gguf(parts[0], host)
    twice = split(whole, tmp_path / "twice", 1)[0]
    twice.rename(twice.with_name("m.gguf"))
    open_gguf(twice.with_name("m.gguf"), host)  # a split into one needs no other
    renamed = split(whole, tmp_path / "renamed", 2)[0]
    renamed.rename(renamed.with_name("m.gguf"))
    with pytest.raises(CheckpointError, match=r"one of 2 files of a model .*NAME-00001-of-00002.gguf"):
        open_gguf(renamed.with_name("m.gguf"), host)
