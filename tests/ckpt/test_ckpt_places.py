"""Runs whose checkpoints lie elsewhere, and which step they go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from mt_ckpt.native.read import open_checkpoint
from mt_core.checkpoint_lookup import find_checkpoint
from mt_core.config.loading import load_config
from mt_core.errors import CheckpointError
from mt_core.paths import as_path, children
from mt_core.testing import run_ranks
from mt_core.train import Trainer
from mt_core.train.checkpoint.run_directory import RunDirectory

SMALL = [
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "data.num_workers=0",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.train_iters=6",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "train.sample_prompt=null",
    "train.num_threads=1",
    "checkpoint.save_interval=2",
    "logging.progress=none",
]

ACCEPTED = 'checkpoint.accept_changes=["parallel.use_distributed_optimizer"]'


def train(run_dir: Path | None, *overrides: str) -> Trainer:
    trainer = Trainer(load_config(preset="gpt-tiny", overrides=[*SMALL, *overrides]), run_dir=run_dir)
    trainer.train()
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    run = tmp_path_factory.mktemp("reference")
    return run, weights(train(run))


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_checkpoints_in_an_object_store(tmp_path: Path, reference, asynchronous: str) -> None:
    store = f"file://{tmp_path}/bucket"
    keys = [f"checkpoint.save={store}", "checkpoint.keep_last=2", f"checkpoint.async_save={asynchronous}"]
    train(tmp_path / "run", *keys, "train.exit_iteration=4")
    assert sorted(entry.name for entry in (tmp_path / "bucket").iterdir()) == ["iter_0000002", "iter_0000004", "latest"]
    assert not (tmp_path / "run" / "checkpoints").exists()
    resumed = train(tmp_path / "run", *keys)
    assert_equal(weights(resumed), reference[1])
    assert sorted(entry.name for entry in (tmp_path / "bucket").iterdir()) == ["iter_0000004", "iter_0000006", "latest"]
    assert find_checkpoint(store) == as_path(store) / "iter_0000006"
    assert open_checkpoint(find_checkpoint(store)).metadata["iteration"] == 6
    loaded = train(None, f"checkpoint.load={store}", "train.train_iters=1", "optimizer.lr=1.0e-9", "optimizer.min_lr=0")
    for name, weight in weights(loaded).items():
        torch.testing.assert_close(weight, reference[1][name], atol=1e-6, rtol=0)


class CachedStore(MemoryFileSystem):
    """A store that keeps listings, as the clients of s3 and gs do unless they are told not to."""

    protocol = "cachedstore"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("cachedstore://", "memory://"))

    def ls(self, path: str, detail: bool = True, **keys: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        try:
            entries = self.dircache[path]
        except KeyError:  # it keeps none
            entries = super().ls(path, detail=True)
        return entries if detail else sorted(entry["name"] for entry in entries)


@pytest.mark.filterwarnings("ignore:UPath 'cachedstore' filesystem")
def test_listings_are_those_of_now() -> None:
    """A rank that looks for another one's report would wait for ever otherwise."""
    from upath import UPath

    fsspec.register_implementation("cachedstore", CachedStore, clobber=True)
    other_process = MemoryFileSystem()
    address = "cachedstore://listings/reports"
    other_process.pipe("/listings/reports/0", b"")
    kept, ours = UPath(address), as_path(address)
    assert [[file.name for file in children(path)] for path in (kept, ours)] == [["0"], ["0"]]
    other_process.pipe("/listings/reports/1", b"")
    assert [file.name for file in children(kept)] == ["0"]  # it does keep listings
    assert [file.name for file in children(ours)] == ["0", "1"]


def test_a_checkpoint_that_lost_its_manifest_is_not_gone_on_from(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/bucket"
    train(tmp_path / "run", f"checkpoint.save={store}", "train.exit_iteration=2")
    (tmp_path / "bucket" / "iter_0000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(tmp_path / "run", f"checkpoint.save={store}")


def test_from_an_earlier_step(tmp_path: Path, reference) -> None:
    """The later ones stay, and do not push out those that are written anew."""
    run = tmp_path / "run"
    train(run, "checkpoint.save_interval=1")
    again = train(run, "checkpoint.ckpt_step=2", "checkpoint.keep_last=1", "train.exit_iteration=4")
    assert again.state.iteration == 4
    left = sorted(path.name for path in (run / "checkpoints").glob("iter_*"))
    assert left == ["iter_0000004", "iter_0000005", "iter_0000006"]
    assert RunDirectory(run).latest_checkpoint() == RunDirectory(run).checkpoint(4)
    assert_equal(weights(train(run)), reference[1])


def test_from_another_run_with_all_of_its_state(tmp_path: Path, reference) -> None:
    run, expected = reference
    forked = train(tmp_path / "fork", f"checkpoint.resume_from={run}", "checkpoint.ckpt_step=4")
    assert_equal(weights(forked), expected)
    by_path = train(tmp_path / "path", f"checkpoint.resume_from={run}/checkpoints/iter_0000002")
    assert_equal(weights(by_path), expected)
    assert RunDirectory(tmp_path / "path").latest_checkpoint() == RunDirectory(tmp_path / "path").checkpoint(6)


def test_steps_that_are_not_there(tmp_path: Path, reference) -> None:
    run, _ = reference
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint\.ckpt_step=3: .* it has iter_0000002, iter_0000004, iter_0000006",
    ):
        train(run, "checkpoint.ckpt_step=3")
    with pytest.raises(CheckpointError, match=r"checkpoint\.ckpt_step=3, but .* has no checkpoint"):
        train(tmp_path / "new", "checkpoint.ckpt_step=3")


def share(rank: int, world: int, run_dir: Path, store: str, layout: list[str]) -> dict[str, torch.Tensor]:
    keys = [f"checkpoint.save={store}", ACCEPTED, *layout]
    return weights(train(run_dir, *keys))


@pytest.mark.slow
def test_two_ranks_and_an_object_store(tmp_path: Path, reference) -> None:
    """Both ranks write into the store what they hold; one process goes on from it."""
    store = f"file://{tmp_path}/bucket"
    layout = ["parallel.use_distributed_optimizer=true", "train.exit_iteration=4"]
    run_ranks(2, share, tmp_path / "run", store, layout)
    reader = open_checkpoint(find_checkpoint(store))
    assert {shard.split("-")[2] for shard in reader.manifest.shards} == {"00000", "00001"}
    sizes = {shard: stored.num_bytes for shard, stored in reader.manifest.shards.items()}
    assert any(len(tensor.pieces) > 1 for name, tensor in reader.manifest.tensors.items() if "exp_avg" in name)
    assert max(sizes.values()) < 0.7 * sum(sizes.values())
    resumed = train(tmp_path / "run", f"checkpoint.save={store}", ACCEPTED)
    for name, weight in weights(resumed).items():
        torch.testing.assert_close(weight, reference[1][name], atol=1e-6, rtol=1e-5)
