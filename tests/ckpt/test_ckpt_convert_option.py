"""`mt train --ckpt-convert-format`: what the run would load, in another format, and no training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mt_ckpt.native.read import open_checkpoint
from mt_cli.main import run
from mt_core.checkpoint_lookup import open_checkpoint as open_any
from mt_core.paths import as_path
from mt_core.plugins import load_plugins

SETTINGS = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "train.train_iters=2",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "train.sample_prompt=null",
    "train.num_threads=1",
    "lr_schedule.lr_warmup_iters=1",
)


def mt_train(run_dir: Path, *more: str) -> int:
    return run(["train", "--run-dir", str(run_dir), *(part for key in SETTINGS for part in ("--set", key)), *more])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "trained"
    assert mt_train(path) == 0
    return path


def assert_same_model(converted: Path, run_dir: Path) -> None:
    mine, theirs = open_any(converted, load_plugins()), open_checkpoint(run_dir / "checkpoints" / "iter_0000002")
    names = [name for name in theirs.shapes() if name.startswith("model.")]
    assert names
    for name in names:
        assert torch.equal(mine.read(name), theirs.read(name)), name


def test_the_checkpoint_that_the_run_would_go_on_from(trained: Path, tmp_path: Path, capsys) -> None:
    before = sorted(trained.rglob("*"))
    assert mt_train(trained, "--ckpt-convert-format", "megatron", "--ckpt-convert-save", str(tmp_path / "out")) == 0
    assert f"{tmp_path / 'out'}: written as megatron" in re.sub(r"\s+", " ", capsys.readouterr().out)
    assert_same_model(tmp_path / "out", trained)
    assert sorted(trained.rglob("*")) == before


def test_the_checkpoint_that_a_new_run_would_start_from(trained: Path, tmp_path: Path) -> None:
    options = ("--ckpt-convert-format", "mt", "--ckpt-convert-save", str(tmp_path / "out"))
    assert mt_train(tmp_path / "new", "--set", f"checkpoint.load={trained}", *options) == 0
    assert_same_model(tmp_path / "out", trained)
    assert not (tmp_path / "new").exists()


def test_one_process_of_several_converts(trained: Path, tmp_path: Path) -> None:
    options = ("--ckpt-convert-format", "mt", "--ckpt-convert-save", str(tmp_path / "out"))
    layout = ("--nproc", "2", "--set", "parallel.tensor_model_parallel_size=2")
    assert mt_train(trained, *layout, *options) == 0
    assert_same_model(tmp_path / "out", trained)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ckpt-convert-format", "hf"], "--ckpt-convert-save is missing"),
        (["--ckpt-convert-save", "out"], "--ckpt-convert-format is missing"),
        (["--ckpt-convert-format", "mt", "--ckpt-convert-save", "out"], "no checkpoint and checkpoint.load is not set"),
    ],
)
def test_bad_options(tmp_path: Path, capsys, options: list[str], words: str) -> None:
    assert mt_train(tmp_path / "new", *options) != 0
    assert words in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_an_address_makes_no_local_folder(
    trained: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    address = f"memory://{tmp_path.name}/x"
    assert mt_train(trained, "--ckpt-convert-format", "megatron", "--ckpt-convert-save", address) != 0
    message = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert f"{address}: --saver megatron writes local folders; copy the result there" in message
    assert mt_train(trained, "--ckpt-convert-format", "mt", "--ckpt-convert-save", address) == 0
    assert open_checkpoint(as_path(address)).metadata["iteration"] > 0
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_is_named(trained: Path, tmp_path: Path, capsys) -> None:
    assert mt_train(trained, "--ckpt-convert-format", "megatorn", "--ckpt-convert-save", str(tmp_path / "out")) != 0
    assert "megatorn" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
