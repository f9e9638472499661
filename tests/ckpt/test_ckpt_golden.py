"""Checkpoints that released versions wrote are read for ever. A new version of the format adds a folder here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mt_ckpt.native.manifest import Manifest, read_manifest
from mt_ckpt.native.read import find_damage, open_checkpoint

GOLDEN = Path(__file__).parent


NAME = "embedding.word_embeddings.weight"
TENSORS = {
    f"model.{NAME}": torch.arange(12.0).reshape(4, 3) / 8,
    f"optimizer.exp_avg.{NAME}": -torch.arange(12.0).reshape(4, 3),
    f"optimizer.step.{NAME}": torch.tensor(3.0),
}


def require_golden(version: int, streams: Mapping[str, torch.Tensor]) -> Manifest:
    """That a released version's checkpoint is what was saved. streams: the states of random streams in it."""
    path = GOLDEN / f"golden_v{version}" / "iter_0000003"
    manifest = read_manifest(path)
    assert (manifest.version, manifest.written_by) == (version, "mt-ckpt 0.1.0")
    assert find_damage(path, manifest) == []
    reader = open_checkpoint(path)
    expected = {**TENSORS, **streams}
    assert list(reader.shapes()) == list(expected)
    for key, tensor in expected.items():
        found = reader.read(key)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert reader.metadata == {"iteration": 3, "consumed_samples": 24, "config": {"model": {"family": "gpt"}}}
    assert reader.files() == {"vocab.json": b'{"a": 0}'}
    return manifest


def test_version_1() -> None:
    require_golden(1, {"rng.cpu": torch.arange(5, dtype=torch.uint8)})


def test_version_2() -> None:
    """Written by two ranks, the optimizer's state divided in the middle of a row."""
    bytes_of = torch.arange(10, dtype=torch.uint8)
    manifest = require_golden(2, {"rng.cpu.0": bytes_of[:5], "rng.cpu.1": bytes_of[5:]})
    assert [len(tensor.pieces) for tensor in manifest.tensors.values()] == [2, 4, 1, 1, 1]
