"""Checkpoints that hold what is trained and name their base: the same run, fewer bytes, and no wrong base."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_core.checkpoint_base import OverBase, tensor_hash
from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config import load_config
from mt_core.config.loading import LoadedConfig
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import load_plugins
from mt_core.tensor_slice import TensorSlice
from mt_core.testing import run_ranks
from mt_core.train import Trainer

FROZEN = 'train.frozen_parameters=["embedding.*", "decoder.layers.0.*"]'
WITHOUT = "checkpoint.save_frozen=false"
SHORT = ("data.corpus_bytes=200000", "train.eval_iters=1", "train.sample_prompt=null", "train.eval_interval=null")


def tiny(*overrides: str) -> LoadedConfig:
    small = ("num_layers=2", "hidden_size=16", "num_attention_heads=2", "max_position_embeddings=16")
    common = ("data.seq_length=16", "train.global_batch_size=4", "train.micro_batch_size=2", "train.train_iters=4")
    keys = [f"model.{key}" for key in small] + list(common) + [*SHORT]
    return load_config(preset="gpt-tiny", overrides=[*keys, *overrides])


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base: a short run that trains everything."""
    path = tmp_path_factory.mktemp("base")
    Trainer(tiny("train.train_iters=1"), run_dir=path).train()
    return find_checkpoint(path)


@pytest.fixture
def base(pretrained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pretrained, tmp_path / "pretrained"))


def tuned(base: Path, directory: Path, *overrides: str) -> CheckpointReader:
    Trainer(tiny(FROZEN, f"checkpoint.load={base}", *overrides), run_dir=directory).train()
    return open_run(directory)


def open_run(directory: Path) -> CheckpointReader:
    return open_checkpoint(find_checkpoint(directory), load_plugins())


def all_tensors(reader: CheckpointReader) -> dict[str, torch.Tensor]:
    return {name: reader.read(name) for name in reader.shapes()}


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in find_checkpoint(directory).rglob("*.safetensors"))


def assert_equal(first: CheckpointReader, second: CheckpointReader) -> None:
    left, right = all_tensors(first), all_tensors(second)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_the_same_run_in_fewer_bytes_also_after_a_resume(base: Path, tmp_path: Path) -> None:
    whole = tuned(base, tmp_path / "whole")
    short = tuned(base, tmp_path / "short", WITHOUT)
    assert isinstance(short, OverBase)
    assert_equal(whole, short)
    assert not any(name.startswith("model.embedding") for name in short.difference.shapes())
    frozen = sum(whole.read(name).nbytes for name in short.entry["tensors"])
    assert frozen > 10_000
    assert size(tmp_path / "whole") - size(tmp_path / "short") == pytest.approx(frozen, abs=2000)  # headers
    # Stopped in its middle and continued.
    tuned(base, tmp_path / "cut", WITHOUT, "train.exit_iteration=2")
    assert_equal(whole, tuned(base, tmp_path / "cut", WITHOUT))
    # A slice of what the base has, and of what was trained.
    for name in ("model.embedding.word_embeddings.weight", "model.decoder.layers.1.mlp.linear_fc1.weight"):
        part = TensorSlice((1, 2), (3, 4))
        assert torch.equal(short.read_slices(name, [part])[0], whole.read(name)[1:4, 2:6])


def test_a_run_over_a_difference_names_the_first_base(base: Path, tmp_path: Path) -> None:
    tuned(base, tmp_path / "first", WITHOUT)
    second = tuned(tmp_path / "first", tmp_path / "second", WITHOUT, "train.frozen_parameters=['decoder.*']")
    assert isinstance(second, OverBase)
    assert second.base_path == base
    # What the first run trained and the second froze is in the second's difference; its embedding was trained now.
    assert "model.decoder.layers.1.mlp.linear_fc1.weight" in second.difference.shapes()
    assert all(name.startswith("model.decoder.layers.0.") for name in second.entry["tensors"])


def test_a_base_that_was_moved_is_found_beside_the_checkpoints(base: Path, tmp_path: Path) -> None:
    whole = tuned(base, tmp_path / "whole")
    tuned(base, tmp_path / "run", WITHOUT)
    moved = base.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"alone; its base .*pretrained is missing.*checkpoints/base"):
        open_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "base").symlink_to(moved)
    assert_equal(whole, open_run(tmp_path / "run"))


def test_another_base_is_refused_by_its_first_tensor(base: Path, tmp_path: Path) -> None:
    tuned(base, tmp_path / "run", WITHOUT, "train.exit_iteration=2")
    shutil.rmtree(base)
    Trainer(tiny("train.train_iters=1", "train.seed=7"), run_dir=tmp_path / "other").train()
    find_checkpoint(tmp_path / "other").rename(base)
    with pytest.raises(CheckpointError, match=r"that it was written over: model\.\S+ has other values"):
        all_tensors(open_run(tmp_path / "run"))
    with pytest.raises(CheckpointError, match="has other values"):
        Trainer(tiny(FROZEN, f"checkpoint.load={base}", WITHOUT), run_dir=tmp_path / "run")
    shutil.rmtree(base)
    Trainer(tiny("train.train_iters=1", "model.hidden_size=32"), run_dir=tmp_path / "wide").train()
    find_checkpoint(tmp_path / "wide").rename(base)
    with pytest.raises(CheckpointError, match=r"model\.\S+ is float32 \[\d+, 32\], not float32 \[\d+, 16\]"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((WITHOUT,), "checkpoint.load has, which is not set"),
        ((WITHOUT, "checkpoint.load=BASE", "checkpoint.ckpt_format=dcp"), "only checkpoints of the format mt"),
        ((WITHOUT, "checkpoint.load=BASE"), "no parameter of checkpoint.load is frozen"),
    ],
)
def test_what_cannot_be_is_refused_before_training(base: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Trainer(tiny(*[override.replace("BASE", str(base)) for override in overrides]))


def test_commands_see_the_whole(mt: Callable[..., Any], base: Path, tmp_path: Path) -> None:
    tuned(base, tmp_path / "whole")
    tuned(base, tmp_path / "run", WITHOUT)
    assert f"over {base}" in mt("ckpt", "inspect", str(tmp_path / "run")).out.replace("\n", "")
    assert mt("ckpt", "diff", str(tmp_path / "run"), str(tmp_path / "whole")).code == 0
    verified = mt("ckpt", "verify", str(tmp_path / "run"))
    assert (verified.code, "the base, with the same values" in verified.out) == (0, True)
    converted = mt("convert", "--load-dir", str(tmp_path / "run"), "--saver", "mt", "--save-dir", str(tmp_path / "one"))
    assert converted.code == 0, converted.err
    one = open_checkpoint(tmp_path / "one", load_plugins())
    assert not isinstance(one, OverBase)
    assert "base" not in one.metadata
    assert_equal(one, open_run(tmp_path / "whole"))


def resume_on_two(rank: int, world: int, base: str, directory: str) -> None:
    size = "parallel.tensor_model_parallel_size"
    parallel = f"{size}=2", f'checkpoint.accept_changes=["{size}"]'
    Trainer(tiny(FROZEN, f"checkpoint.load={base}", WITHOUT, *parallel), run_dir=directory).train()


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_go_on_from_the_difference_of_one(base: Path, tmp_path: Path) -> None:
    """A run of one process is continued on two; frozen parameters are those of the base to the bit, others by
    rounding."""
    whole = tuned(base, tmp_path / "whole")
    tuned(base, tmp_path / "run", WITHOUT, "train.exit_iteration=2")
    run_ranks(2, resume_on_two, str(base), str(tmp_path / "run"))
    resumed = open_run(tmp_path / "run")
    assert isinstance(resumed, OverBase)
    for name in resumed.entry["tensors"]:
        assert tensor_hash(resumed.read(name)) == tensor_hash(whole.read(name))
    name = "model.decoder.layers.1.mlp.linear_fc1.weight"
    torch.testing.assert_close(resumed.read(name), whole.read(name), rtol=1e-5, atol=1e-6)
