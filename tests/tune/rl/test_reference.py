"""rl.beta: the policy is held to the weights that it started from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import TP2
from tests.tune.rl.runs import config
from tests.tune.rl.test_layouts import folder_of_all
from torch import Tensor, nn

from mt_core.train import Callback, Trainer

pytestmark = [pytest.mark.dist, pytest.mark.slow]

BETA = 0.5
HELD = (f"rl.beta={BETA}", "lr_schedule.lr_warmup_iters=0", "optimizer.lr=0.02", "train.train_iters=3")


class Lines(Callback):
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def on_log(self, run: Any, metrics: Any) -> None:
        self.lines.append({name: metrics[name] for name in ("kl", "loss", "grad_norm")})


def trained(folder: Path, name: str, *keys: str) -> tuple[Trainer, list[Any]]:
    lines = Lines()
    load = f"checkpoint.load={folder / 'base'}"
    trainer = Trainer(config(folder, *HELD, load, *keys), run_dir=folder / name, callbacks=[lines])
    trainer.train()
    return trainer, lines.lines


def train_base(folder: Path, *keys: str) -> None:
    Trainer(config(folder, "train.train_iters=1", *keys), run_dir=folder / "base").train()


@torch.no_grad()
def logps(model: nn.Module, row: Any) -> Tensor:
    whole = torch.tensor([[*row.prompt, *row.completion]])
    scores = model.eval()(tokens=whole[:, :-1]).float().log_softmax(-1)
    return scores.gather(-1, whole[:, 1:, None])[0, len(row.prompt) - 1 :, 0]


def test_the_divergence_is_that_of_plain_torch(tmp_path: Path) -> None:
    """3 s: of the completions of the second step, by the weights behind the first one and those of the checkpoint."""
    train_base(tmp_path)
    reference = Trainer(config(tmp_path, *HELD, f"checkpoint.load={tmp_path / 'base'}")).model
    first, _ = trained(tmp_path, "first", "train.exit_iteration=1")
    second, lines = trained(tmp_path, "second", "train.exit_iteration=2")
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    divergences, losses = [], []
    for row in second.source.rows:
        ratios = logps(reference, row) - logps(first.model, row)
        divergences.append(ratios.exp() - ratios - 1)
        losses.append(BETA * divergences[-1] - torch.from_numpy(row.values["advantages"]))
    kl = float(torch.cat(divergences).mean())
    assert kl > 1e-4
    assert lines[1]["kl"] == pytest.approx(kl, rel=1e-4)
    assert lines[1]["loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-4, abs=1e-6)


def held(rank: int, world: int, keys: tuple[str, ...]) -> Any:
    folder = folder_of_all(world)
    train_base(folder, *keys)
    return trained(folder, "run", *keys)[1]


CASES = [(TP2,), ("rl.kl_in=reward",), ("rl.steps_per_generation=2", "rl.kl_estimator=k2")]
RUNS = InTurn(held, [(1, keys) for keys in ((), *CASES[1:])], [(2, keys) for keys in CASES])


@pytest.mark.long
@pytest.mark.parametrize("keys", CASES, ids=" ".join)
def test_two_processes_have_the_divergences_of_one(keys: tuple[str, ...]) -> None:
    """8 s for all, which share processes: tensor parallelism, and data parallelism with other forms."""
    expected = RUNS.result(1, () if keys == (TP2,) else keys)
    found = RUNS.result(2, keys)
    assert found[-1]["kl"] > 1e-4
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-3, abs=2e-6)
