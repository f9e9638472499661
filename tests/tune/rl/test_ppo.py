"""PPO: advantages and losses as TRL's PPOTrainer computes them, learning, resuming, layouts, and what it starts from.

TRL 1.16 has no PPOTrainer any more; the formulas are those of its last one, written again in plain torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import FSDP, PP2, SP, TP2, ZERO
from tests.tune.rl.runs import config
from tests.tune.rl.test_layouts import Lines as LinesOfLayout
from tests.tune.rl.test_layouts import folder_of_all
from tests.tune.rl.test_rollouts import trained

from mt_core.errors import CheckpointError, ConfigError
from mt_core.train import Trainer
from mt_tune.rl.gae import Discounts, estimated
from mt_tune.rl.value_model import ValueLoss

PPO = ("rl.advantage=gae", "rl.group_size=1", "rl.kl_in=reward")
UPDATES = ("rl.steps_per_generation=2", "rl.num_iterations=2", "train.train_iters=6")
LENGTHS = [5, 3, 1, 4]
GAMMA, LAM, BETA = 0.97, 0.9, 0.05


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[4, 5] numbers of tokens, and which of them exist."""
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * mask, mask


def test_advantages_and_returns_of_a_padded_batch() -> None:
    values, mask = drawn(0)
    differences, _ = drawn(1)
    scores = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.float64)
    rewards = -BETA * differences
    rewards[torch.arange(4), torch.tensor(LENGTHS) - 1] += scores
    advantages, last = [], torch.zeros(4, dtype=torch.float64)
    for t in reversed(range(5)):
        following = values[:, t + 1] if t < 4 else torch.zeros(4, dtype=torch.float64)
        last = rewards[:, t] + GAMMA * following - values[:, t] + GAMMA * LAM * last
        advantages.append(last)
    plain = torch.stack(advantages[::-1], 1)
    kept = plain[mask]
    whitened = (plain - kept.mean()) * torch.rsqrt(kept.var() + 1e-8)
    rows = [(values[n, :length].numpy(), BETA * differences[n, :length].numpy()) for n, length in enumerate(LENGTHS)]
    found = estimated(scores.tolist(), [part for _, part in rows], [part for part, _ in rows], Discounts(GAMMA, LAM))
    np.testing.assert_allclose(np.concatenate(found.advantages), whitened[mask].numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(found.returns), (plain + values)[mask].numpy(), rtol=1e-12)


def test_a_completion_without_a_reward_is_in_no_mean() -> None:
    parts = [np.zeros(2), np.zeros(3), np.zeros(2)]
    values = [np.array([0.5, 1.0]), np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0])]
    found = estimated([1.0, float("nan"), 2.0], parts, values, Discounts(1.0, 1.0))
    # Returns are the rewards, from which the values are subtracted: 0.5, 0 and 2, 1, with mean 0.875.
    expected = (np.array([0.5, 0.0, 2.0, 1.0]) - 0.875) / np.array([0.5, 0.0, 2.0, 1.0]).std(ddof=1)
    np.testing.assert_allclose(np.concatenate([found.advantages[0], found.advantages[2]]), expected, rtol=1e-6)
    assert found.advantages[1].tolist() == [0.0] * 3
    assert found.returns[1].tolist() == values[1].tolist()


def test_the_clipped_loss_of_values_and_its_gradient() -> None:
    (old, mask), (returns, _), (moved, _) = drawn(2), drawn(3), drawn(4)
    ours, theirs = ((old + moved).float().requires_grad_() for _ in range(2))
    batch = {"old_values": old.float(), "returns": returns.float(), "loss_mask": mask.float()}
    loss = ValueLoss(0.2)
    (loss(ours[..., None], batch)[mask].mean()).backward()
    clipped = torch.clamp(theirs, batch["old_values"] - 0.2, batch["old_values"] + 0.2)
    squares, clipped_squares = (theirs - batch["returns"]) ** 2, (clipped - batch["returns"]) ** 2
    (0.5 * torch.max(squares, clipped_squares)[mask].mean()).backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)
    recorded = {name: value for name, value, _ in loss.take_recorded()}
    assert recorded["val/clipfrac_avg"] == pytest.approx(float((clipped_squares > squares)[mask].float().mean()))


@pytest.mark.slow
def test_a_preference_for_some_tokens_is_learnt_by_single_completions(tmp_path: Path) -> None:
    """3 s"""
    length = ("train.train_iters=40", "train.global_batch_size=32", "train.micro_batch_size=16", "rl.patience=0")
    constant = "lr_schedule.lr_decay_style=constant"
    _, lines = trained(tmp_path, *PPO, *length, constant, "optimizer.lr=0.02", reward="low")
    assert lines[0]["reward"] < 0.4
    assert lines[-1]["reward"] > 0.8
    # The value model learns what rewards to expect.
    assert lines[-1]["values/mean"] == pytest.approx(lines[-1]["reward"], abs=0.1)


@pytest.mark.slow
def test_a_resumed_run_takes_the_same_steps(tmp_path: Path) -> None:
    """With the value model and its optimizer, held to a reference and within a generation. 4 s"""
    trained(tmp_path, "train.train_iters=1", "optimizer.lr=0", "optimizer.min_lr=0", run="start")
    held = ("rl.beta=0.1", f"checkpoint.load={tmp_path / 'start'}", "rl.value_lr=0.02", "checkpoint.save_interval=1")
    keys = (*PPO, *UPDATES, *held)
    _, whole = trained(tmp_path, *keys, run="whole")
    _, first = trained(tmp_path, *keys, "train.exit_iteration=3", run="parts")
    _, rest = trained(tmp_path, *keys, run="parts")
    for name in ("loss", "grad_norm", "loss/value_avg", "values/grad_norm", "objective/kl"):
        found = [line.get(name) for line in first + rest]
        assert found == [line.get(name) for line in whole]
    assert whole[4]["objective/kl"] != 0
    # A run of its own, from which other runs of values start.
    other = (*PPO, f"rl.value_model={tmp_path / 'whole' / 'value_model'}", "train.train_iters=1")
    _, lines = trained(tmp_path, *other, run="other")
    assert abs(whole[0]["values/mean"]) < 0.05
    assert lines[0]["values/mean"] > 0.2
    (tmp_path / "parts" / "value_model" / "checkpoints" / "iter_0000006").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="no checkpoint of step|no checkpoint of that step"):
        Trainer(config(tmp_path, *keys), run_dir=tmp_path / "parts")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("rl.value_lr=0.1",), r"rl.value_lr=0.1 is of a value model"),
        ((*PPO, "rl.dynamic_sampling=true"), "nothing to compare"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, *keys)


LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "dp": (),
    "tp-sp": (TP2, SP),
    "pp": (PP2,),
    "zero": (ZERO,),
    "fsdp": (FSDP,),
}


def losses(rank: int, world: int, layout: str) -> Any:
    lines = LinesOfLayout("loss", "grad_norm", "loss/value_avg", "values/grad_norm", "values/explained_variance")
    keys = ("train.micro_batch_size=2", *PPO, *UPDATES, "train.train_iters=4", *LAYOUTS[layout])
    Trainer(config(folder_of_all(world), *keys), callbacks=[lines]).train()
    return lines.lines


RUNS = InTurn(losses, [(1, "one process")], [(2, layout) for layout in LAYOUTS if layout != "one process"])


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one process"])
def test_a_layout_takes_the_steps_of_one_process(layout: str) -> None:
    """12 s for all, which share processes."""
    for one, other in zip(RUNS.result(2, layout), RUNS.result(1, "one process"), strict=True):
        assert one == pytest.approx(other, rel=2e-3, abs=2e-6)
