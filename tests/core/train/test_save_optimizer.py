"""Checkpoints without the optimizer's state: fewer bytes, weights to start from, and no resume."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from tests.core.train.test_save_frozen import open_run, size, tiny

from mt_core.checkpoint_lookup import find_checkpoint
from mt_core.errors import CheckpointError
from mt_core.train import Trainer

WITHOUT = "checkpoint.save_optimizer=false"


@pytest.mark.slow
def test_weights_are_saved_and_the_optimizer_is_not(tmp_path: Path) -> None:
    bf16 = "precision.dtype=bf16"
    for name, more in (("with", ()), ("without", (WITHOUT,))):
        Trainer(tiny(bf16, "train.train_iters=2", *more), run_dir=tmp_path / name).train()
    whole, weights = open_run(tmp_path / "with"), open_run(tmp_path / "without")
    kept = {name for name in whole.shapes() if not name.startswith("optimizer.")}
    assert weights.shapes().keys() == kept
    assert all((whole.read(name) == weights.read(name)).all() for name in kept)
    parameters = sum(prod(weights.shapes()[name]) for name in kept if name.startswith("model."))
    # Of 14 bytes a parameter 2 stay: the fp32 weight and both moments are left out.
    assert size(tmp_path / "with") - size(tmp_path / "without") >= 12 * parameters
    with pytest.raises(CheckpointError, match=r"checkpoint\.save_optimizer=false.*checkpoint\.load"):
        Trainer(tiny(bf16, "train.train_iters=2", WITHOUT), run_dir=tmp_path / "without").train()
    started = tiny(bf16, "train.train_iters=1", f"checkpoint.load={find_checkpoint(tmp_path / 'without')}")
    assert Trainer(started).train().state.iteration == 1
