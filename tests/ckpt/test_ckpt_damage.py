"""Damage anywhere in a checkpoint is found and the file is named, never returned as a value."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from mt_ckpt.files.checksum import checksum
from mt_ckpt.native.manifest import detect, read_manifest
from mt_ckpt.native.read import find_damage, open_checkpoint
from mt_core.errors import CheckpointError
from mt_core.paths import as_path


def read_all(path: Path) -> None:
    reader = open_checkpoint(path)
    reader.files()
    for name in reader.shapes():
        reader.read(name)


def verify(path: Path) -> None:
    if problems := find_damage(path, read_manifest(path)):
        raise CheckpointError("\n".join(problems))


def assert_both_name(path: Path, file: Path, *words: str) -> None:
    """Reading and verifying both refuse the checkpoint, and both name the file."""
    for check in (read_all, verify):
        with pytest.raises(CheckpointError) as caught:
            check(path)
        assert str(file) in str(caught.value)
        assert all(word in str(caught.value) for word in words)


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def offsets(size: int) -> list[int]:
    """The ends, the middle, the parts of a shard's header, and some at random."""
    chosen = {0, 1, 7, 8, 9, 60_000, (64 << 10) - 1, 64 << 10, size // 2, size - 2, size - 1}
    chosen |= {random.Random(size).randrange(size) for _ in range(6)}
    return sorted(offset for offset in chosen if 0 <= offset < size)


@pytest.mark.slow
def test_one_changed_byte_anywhere(saved: Path) -> None:
    tried = 0
    for file in files_of(saved):
        original = file.read_bytes()
        for offset in offsets(len(original)) if original else []:
            for flipped in (0x01, 0x20, 0x80):
                damaged = bytearray(original)
                damaged[offset] ^= flipped
                file.write_bytes(damaged)
                assert_both_name(saved, file, "damaged")
                tried += 1
        file.write_bytes(original)
    assert tried > 200
    read_all(saved)
    verify(saved)


def test_truncated_extended_and_missing_files(saved: Path) -> None:
    for file in files_of(saved):
        original = file.read_bytes()
        if original:
            file.write_bytes(original[:-1])
            assert_both_name(saved, file)
        file.write_bytes(original + b" ")
        assert_both_name(saved, file, "damaged")
        file.unlink()
        if file.name == "manifest.json":
            assert not detect(saved)
            with pytest.raises(CheckpointError, match=r"iter_0000001: not a complete mt checkpoint: .* manifest.json"):
                open_checkpoint(saved)
        else:
            assert_both_name(saved, file, "missing")
        file.write_bytes(original)


def test_a_shard_is_checked_when_it_is_first_read(saved: Path) -> None:
    """Not at opening, which every rank does: the others can be read, and of this one no value is."""
    reader = open_checkpoint(saved)
    shard = saved / reader.manifest.tensors["model.layers.0.weight"].pieces[0].shard
    os.truncate(shard, shard.stat().st_size - 1)  # of another tensor's bytes
    reader = open_checkpoint(saved)
    reader.read("model.bias")
    with pytest.raises(CheckpointError, match=rf"{shard.name}: truncated: \d+ bytes instead of \d+"):
        reader.read("model.layers.0.weight")


def test_a_missing_shard_is_found_at_opening(saved: Path) -> None:
    shards = [saved / name for name in open_checkpoint(saved).manifest.shards]
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"{shards[1].name}: missing; use an earlier"):
        open_checkpoint(saved)
    shards[2].unlink()
    with pytest.raises(CheckpointError, match=rf"{shards[1].name}: missing and 1 more"):
        open_checkpoint(saved)


def test_opening_reads_no_shard(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them in an object store would cost a request each, on every rank."""
    path = as_path(f"memory://{saved}")
    path.fs.put(str(saved), path.path, recursive=True)
    asked: set[str] = set()
    for method in ("info", "cat_file", "_open"):
        monkeypatch.setattr(MemoryFileSystem, method, recording(getattr(MemoryFileSystem, method), asked))
    reader = open_checkpoint(path)
    assert len(reader.manifest.shards) > 4
    assert f"{path.path}/manifest.json" in asked
    assert not [file for file in asked if file.endswith(".safetensors")]
    assert torch.equal(reader.read("model.bias"), open_checkpoint(saved).read("model.bias"))
    shard = reader.manifest.tensors["model.bias"].pieces[0].shard
    assert [file for file in asked if file.endswith(".safetensors")] == [f"{path.path}/{shard}"]


def recording(method: Callable[..., Any], asked: set[str]) -> Callable[..., Any]:
    def recorded(self: MemoryFileSystem, path: str, *args: Any, **keys: Any) -> Any:
        asked.add(path)
        return method(self, path, *args, **keys)

    return recorded


def test_damage_after_opening_is_found_at_the_read(saved: Path) -> None:
    reader = open_checkpoint(saved)
    reader.read("model.bias")
    shard = saved / reader.manifest.tensors["model.bias"].pieces[0].shard
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: truncated"):
        reader.read("model.bias")
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: cannot be read: No such file"):
        reader.read("model.bias")
    with pytest.raises(CheckpointError, match=rf"{shard.name}: missing or unreadable: No such file"):
        open_checkpoint_without_listing(saved).read("model.bias")


def open_checkpoint_without_listing(path: Path):
    from mt_ckpt.native.read import NativeReader

    return NativeReader(path, read_manifest(path))


def test_shards_swapped_with_those_of_another_checkpoint(saved: Path, kit) -> None:
    other = saved.with_name("iter_0000002")
    kit.save(other, 2)
    shard = saved / open_checkpoint(saved).manifest.tensors["model.layers.0.weight"].pieces[0].shard
    shutil.copy(other / shard.name, shard)
    assert_both_name(saved, shard, "damaged", "model.layers.0.weight")


# -- a manifest whose checksum is right and whose content is not ------------------------------------


def rewrite_manifest(path: Path, change) -> None:
    """Change the manifest and give it a fitting checksum, as another program could."""
    file = path / "manifest.json"
    content = json.loads(file.read_text())
    del content["manifest_checksum"]
    change(content)
    rest = json.dumps(content)[1:].encode()
    file.write_bytes(f'{{"manifest_checksum": "{checksum(rest)}",\n'.encode() + rest)


def rng_piece(content: dict) -> dict:
    return content["tensors"]["rng"]["pieces"][0]


def part_of_rng(content: dict, start: int, length: int) -> dict:
    return {**rng_piece(content), "start": [start], "shape": [length]}


def test_a_rewritten_manifest_is_accepted_unchanged(saved: Path) -> None:
    rewrite_manifest(saved, lambda content: None)
    read_all(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(version=3, written_by="mt-ckpt 9.1.0"), ["version 3", 'pip install "mt-ckpt>=9.1.0"']),
        (lambda m: m.update(format="other"), ["'other'", "not an mt checkpoint"]),
        (lambda m: m.update(version="1"), ["version '1'"]),
        (lambda m: m.update(checksum_algorithm="md5"), ["checksum_algorithm 'md5'"]),
        (lambda m: m.update(extra=1), ["extra"]),
        (lambda m: m["files"].pop("metadata.json"), ["metadata.json"]),
        (
            lambda m: m["files"].update({"../../x": m["files"]["files/note.txt"]}),
            ["'../../x'", "out of the checkpoint"],
        ),
        (lambda m: m["tensors"]["rng"].update(dtype="PICKLE"), ["tensor rng", "'PICKLE'", "BF16"]),
        (lambda m: m["tensors"]["rng"].update(shape=[-1]), ["tensors.rng.shape"]),
        (lambda m: m["tensors"]["rng"].update(shape=[10**18]), ["tensor rng", "do not cover"]),
        (lambda m: rng_piece(m).update(shape=[10**18]), ["tensor rng", "is not inside"]),
        (lambda m: rng_piece(m).update(start=[1]), ["tensor rng", "is not inside"]),
        (lambda m: rng_piece(m).update(start=[-1]), ["tensors.rng.pieces.0.start"]),
        (lambda m: m["tensors"]["rng"]["pieces"].append(rng_piece(m)), ["tensor rng", "do not cover"]),
        (
            lambda m: m["tensors"]["rng"].update(shape=[4], pieces=[part_of_rng(m, 0, 3), part_of_rng(m, 1, 1)]),
            ["tensor rng", "do not cover"],
        ),
        (lambda m: rng_piece(m).update(offset=0), ["tensor rng", "does not begin"]),
        (lambda m: rng_piece(m).update(shard="x.safetensors"), ["tensor rng", "'x.safetensors'"]),
        (lambda m: m["tensors"].pop("rng"), ["its tensors end at"]),
    ],
)
def test_manifests_that_contradict_themselves(saved: Path, change, words: list[str]) -> None:
    rewrite_manifest(saved, change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(saved)
    assert all(word in str(caught.value) for word in [str(saved / "manifest.json"), *words])


def test_directories_of_others(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        open_checkpoint(tmp_path / "none")
    assert not detect(tmp_path / "none")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not detect(tmp_path)
    with pytest.raises(CheckpointError, match=r"not a complete mt checkpoint: it has no manifest\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged \(or not written by mt\)"):
        open_checkpoint(tmp_path)
