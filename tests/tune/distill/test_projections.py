"""Trained maps from the student's hidden states to those of a teacher of another width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from tests.tune.distill.runs import config, distilled
from torch import Tensor

from mt_core.errors import CheckpointError, ConfigError
from mt_core.testing import run_ranks
from mt_core.train import Trainer

WIDE = ("model.hidden_size=24", "train.seed=7")
PAIRS = "distillation.hidden_layers=['1:2', '2:1']"
PROJECTED = (PAIRS, "distillation.hidden_projection=true", "distillation.hidden_projection_lr=0.02")
LAYOUTS = {
    "dp": (),
    "tp and sp": ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
    "tp": ("parallel.tensor_model_parallel_size=2",),
    "cp": ("parallel.context_parallel_size=2",),
    "fsdp": ("parallel.use_torch_fsdp2=true",),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    Trainer(config("train.train_iters=3", "optimizer.lr=0.03", *WIDE), run_dir=folder).train()
    return folder


def outputs_of_layers(model: Any, tokens: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, x: kept.append(x.detach())) for layer in model.decoder.layers]
    with torch.no_grad():
        model.eval()(tokens=tokens)
    for hook in hooks:
        hook.remove()
    return kept


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_maps_are_trained_as_plain_torch_trains_them(teacher: Path, kind: str) -> None:
    """The student stays as it is, so that the maps alone are trained, in three steps of two micro-batches."""
    still = ("optimizer.lr=0.0", "optimizer.min_lr=0.0", f"distillation.hidden_loss={kind}", "train.eval_interval=3")
    trainer = Trainer(distilled(teacher, *PROJECTED, *still, "distillation.hidden_weight=3.0"))
    maps = trainer.source.teaching.projections  # type: ignore[attr-defined]
    expected = [torch.nn.Parameter(matrix.detach().clone()) for matrix in maps.matrices]
    assert [tuple(matrix.shape) for matrix in expected] == [(24, 16), (24, 16)]
    taught = Trainer(config(*WIDE))
    taught.engine.load_state(teacher)
    adam = torch.optim.Adam(expected, lr=0.02)

    def loss_of(batches: Any) -> Tensor:
        losses = []
        for arrays in batches:
            tokens = torch.from_numpy(arrays["tokens"])
            student, wide = (outputs_of_layers(run.model, tokens) for run in (trainer, taught))
            for matrix, one, other in zip(expected, (0, 1), (1, 0), strict=True):
                x, y = student[one] @ matrix.T, wide[other]
                losses.append((x - y).square().mean() if kind == "mse" else (1 - F.cosine_similarity(x, y, -1)).mean())
        return torch.stack(losses).mean()

    data = list(trainer.engine.read_batches(trainer.train_data, [(0, 4), (4, 4), (8, 4)]))
    for batch in data:
        adam.zero_grad()
        (3 * loss_of(batch.micro_batches)).backward()
        adam.step()
    trainer.train()
    for matrix, wanted in zip(maps.matrices, expected, strict=True):
        torch.testing.assert_close(matrix, wanted, rtol=1e-4, atol=1e-5)
    # The evaluation behind the last step has the maps of the last step.
    valid = next(trainer.engine.read_batches(trainer.valid_data["valid"], [(0, 4)]))
    assert trainer.last_evaluation["valid_hidden"] == pytest.approx(loss_of(valid.micro_batches).item(), rel=1e-4)


def test_a_run_is_resumed_with_its_maps_which_the_student_does_not_have(teacher: Path, tmp_path: Path) -> None:
    keys = (*PROJECTED, "train.train_iters=4", "checkpoint.save_interval=2")
    whole = Trainer(distilled(teacher, *keys), run_dir=tmp_path / "whole")
    whole.train()
    Trainer(distilled(teacher, *keys, "train.exit_iteration=2"), run_dir=tmp_path / "parts").train()
    resumed = Trainer(distilled(teacher, *keys), run_dir=tmp_path / "parts")
    resumed.train()
    for (name, one), (_, other) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
        assert "projection" not in name
    files = [tmp_path / run / "hidden_projections" / "iter_0000004.safetensors" for run in ("whole", "parts")]
    first, second = map(safetensors.torch.load_file, files)
    assert all(torch.equal(first[name], second[name]) for name in first)
    # A run that starts from the student needs nothing of them.
    Trainer(config(f"checkpoint.load={json.dumps(str(tmp_path / 'whole'))}"))
    files[1].unlink()
    longer = ("train.train_iters=6", "checkpoint.accept_changes=['train.train_iters']")
    with pytest.raises(CheckpointError, match="continues with the matrices that it had"):
        Trainer(distilled(teacher, *keys, *longer), run_dir=tmp_path / "parts").train()


def test_what_cannot_be_is_refused(teacher: Path) -> None:
    with pytest.raises(ConfigError, match=r"train a map between them \(distillation.hidden_projection=true\)"):
        Trainer(distilled(teacher, PAIRS)).train()
    with pytest.raises(ConfigError, match="which names none"):
        distilled(teacher, "distillation.hidden_projection=true")
    with pytest.raises(ConfigError, match="do not follow the loss scale"):
        distilled(teacher, *PROJECTED, "precision.dtype=fp16")


def trained_in(rank: int, world: int, teacher: str, layouts: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    results = {}
    for name, keys in layouts.items():
        trainer = Trainer(distilled(teacher, *PROJECTED, "optimizer.lr=0.01", *keys))
        trainer.train()
        maps = trainer.source.teaching.projections  # type: ignore[attr-defined]
        values = np.concatenate([matrix.detach().flatten().numpy() for matrix in maps.matrices])
        results[name] = (trainer.last_evaluation["valid_loss"], values)
    return results


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_train_the_same_maps(teacher: Path) -> None:
    loss, values = trained_in(0, 1, str(teacher), {"alone": ()})["alone"]
    for of_rank in run_ranks(2, trained_in, str(teacher), LAYOUTS):
        for name, (other_loss, others) in of_rank.items():
            assert other_loss == pytest.approx(loss, rel=2e-5), name
            np.testing.assert_allclose(others, values, rtol=1e-3, atol=2e-5, err_msg=name)
