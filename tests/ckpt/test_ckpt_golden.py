"""Checkpoints that released versions wrote are read for ever. A new version of the format adds a folder here."""

from __future__ import annotations

from pathlib import Path

import torch

from mt_ckpt.native.manifest import read_manifest
from mt_ckpt.native.read import open_checkpoint
from mt_ckpt.native.verify import find_damage

GOLDEN = Path(__file__).parent


def test_version_1() -> None:
    path = GOLDEN / "golden_v1" / "iter_0000003"
    manifest = read_manifest(path)
    assert (manifest.version, manifest.written_by) == (1, "mt-ckpt 0.1.0")
    assert find_damage(path, manifest) == []
    reader = open_checkpoint(path)
    name = "embedding.word_embeddings.weight"
    expected = {
        f"model.{name}": torch.arange(12.0).reshape(4, 3) / 8,
        f"optimizer.exp_avg.{name}": -torch.arange(12.0).reshape(4, 3),
        f"optimizer.step.{name}": torch.tensor(3.0),
        "rng.cpu": torch.arange(5, dtype=torch.uint8),
    }
    assert list(reader.shapes()) == list(expected)
    for key, tensor in expected.items():
        found = reader.read(key)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert reader.metadata == {"iteration": 3, "consumed_samples": 24, "config": {"model": {"family": "gpt"}}}
    assert reader.files() == {"vocab.json": b'{"a": 0}'}


def test_version_2() -> None:
    """Written by two ranks, the optimizer's state divided in the middle of a row."""
    path = GOLDEN / "golden_v2" / "iter_0000003"
    manifest = read_manifest(path)
    assert (manifest.version, manifest.written_by) == (2, "mt-ckpt 0.1.0")
    assert find_damage(path, manifest) == []
    reader = open_checkpoint(path)
    name = "embedding.word_embeddings.weight"
    expected = {
        f"model.{name}": torch.arange(12.0).reshape(4, 3) / 8,
        f"optimizer.exp_avg.{name}": -torch.arange(12.0).reshape(4, 3),
        f"optimizer.step.{name}": torch.tensor(3.0),
        "rng.cpu.0": torch.arange(5, dtype=torch.uint8),
        "rng.cpu.1": torch.arange(5, 10, dtype=torch.uint8),
    }
    assert set(reader.shapes()) == set(expected)
    assert [len(tensor.pieces) for tensor in manifest.tensors.values()] == [2, 4, 1, 1, 1]
    for key, tensor in expected.items():
        found = reader.read(key)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert reader.metadata == {"iteration": 3, "consumed_samples": 24, "config": {"model": {"family": "gpt"}}}
    assert reader.files() == {"vocab.json": b'{"a": 0}'}
