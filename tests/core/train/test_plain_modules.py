"""A torch.nn.Module without declared parameters, its own fields and its own loss, against a loop of plain torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.config import load_config
from mt_core.config.checks import as_world
from mt_core.errors import ConfigError
from mt_core.testing import run_ranks
from mt_core.train import Engine, Trainer

ROWS, STEPS, LR = 8, 4, 0.01
KEYS = (
    f"train.train_iters={STEPS}",
    f"train.global_batch_size={ROWS}",
    "train.micro_batch_size=2",
    "train.eval_iters=1",
    "train.eval_interval=null",
    "train.sample_prompt=null",
    "checkpoint.save_interval=null",
    f"optimizer.lr={LR}",
    f"optimizer.min_lr={LR}",
    "lr_schedule.lr_decay_style=constant",
    "lr_schedule.lr_warmup_iters=0",
    "logging.progress=none",
)
LAYOUTS = {
    "data parallel": (),
    "ZeRO-1": ("parallel.use_distributed_optimizer=true",),
    "FSDP2": ("parallel.use_torch_fsdp2=true",),
}


class Ratings(nn.Module):
    """Two towers that share a table, and a list of layers; returns what no mt model does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, user: Tensor, item: Tensor) -> dict[str, Tensor]:
        x = self.table(user) * self.table(item)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"rating": self.scale * self.head(x)}


class Rows:
    def __init__(self, count: int = 64) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        drawn = np.random.default_rng(index)
        return {name: drawn.integers(0, 11) for name in ("user", "item", "rating")}

    def describe(self, index: int) -> str:
        return f"row {index}"


def loss_of_rows(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output["rating"], batch["rating"], reduction="none")


def mean_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output["rating"], batch["rating"])


def seeded(seed: int = 3) -> Ratings:
    torch.manual_seed(seed)
    return Ratings()


def by_plain_torch() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of AdamW with mt's rule: decay on weights of two dimensions alone."""
    model = seeded()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    losses, data = [], Rows()
    for step in range(STEPS):
        rows = [data[index] for index in range(step * ROWS, (step + 1) * ROWS)]
        batch = {name: torch.tensor([int(row[name]) for row in rows]) for name in rows[0]}
        loss = mean_loss(model(batch["user"], batch["item"]), batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(rank: int, world: int, keys: tuple[str, ...], loss: Any = loss_of_rows) -> tuple[list[float], Any]:
    loaded = load_config(overrides=[*KEYS, "optimizer.adam_beta2=0.999", *keys])
    # Each rank begins with other weights; those of the first one count.
    engine = Engine.build(loaded, model=seeded(3 + rank), loss=loss)
    losses = [engine.train_step(batch).loss for batch in engine.train_batches(Rows())]
    weights = {
        name: engine.layouts[name].to_canonical(engine.weights.unshard(name, part.detach()), engine.ctx)
        for name, part in engine.weights.named_parameters()
    }
    return losses, weights


def require_plain_torch(found: tuple[list[float], Any]) -> None:
    losses, weights = by_plain_torch()
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert set(found[1]) == set(weights)
    for name, expected in weights.items():
        torch.testing.assert_close(found[1][name].view_as(expected), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [loss_of_rows, mean_loss])
def test_one_process_is_plain_torch(loss) -> None:
    """A scalar loss is the mean over the rows of a micro-batch."""
    require_plain_torch(trained(0, 1, (), loss))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_over_two_ranks_are_plain_torch(layout: str) -> None:
    for found in run_ranks(2, trained, LAYOUTS[layout]):
        require_plain_torch(found)


def test_a_forward_step_takes_the_place_of_the_call_and_the_loss() -> None:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_of_rows(model(user=batch["user"], item=batch["item"]), batch)

    engine = Engine.build(load_config(overrides=list(KEYS)), model=seeded(), forward_step=step)
    losses = [engine.train_step(batch).loss for batch in engine.train_batches(Rows())]
    assert losses[0] == pytest.approx(by_plain_torch()[0][0], rel=1e-5)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(1), nn.Linear(1, 11)

    def forward(self, user: Tensor) -> Tensor:
        return self.head(self.norm(user[:, None].float()))


def normalized_run(folder: Path, *keys: str) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(
        load_config(overrides=[*KEYS, *keys]),
        model=Normalized(),
        loss=lambda output, batch: F.cross_entropy(output, batch["rating"]),
        train_data=Rows(),
        valid_data={"valid": Rows(8)},
        run_dir=folder,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(("valid_data", "names"), [(Rows(8), ["valid"]), ({"a": Rows(8), "b": Rows(4)}, ["a", "b"])])
def test_validation_data_is_one_data_set_or_several_by_name(valid_data: Any, names: list[str]) -> None:
    trainer = Trainer(
        load_config(overrides=KEYS), model=seeded(), loss=loss_of_rows, train_data=Rows(), valid_data=valid_data
    )
    assert sorted(trainer.validation.evaluate()) == [f"{name}_loss" for name in names]


def test_a_resumed_run_ends_with_the_same_weights_and_buffers(tmp_path: Path) -> None:
    whole = normalized_run(tmp_path / "whole")
    normalized_run(tmp_path / "parts", "train.exit_iteration=2")
    resumed = normalized_run(tmp_path / "parts")
    assert resumed.state.iteration == STEPS
    states = [copy.deepcopy(run.model.state_dict()) for run in (whole, resumed)]
    assert states[0]["norm.num_batches_tracked"] == STEPS * ROWS // 2  # one a micro-batch
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("parallel.tensor_model_parallel_size=2", "the split of each parameter"),
        ("parallel.pipeline_model_parallel_size=2", "its stages"),
        ("parallel.context_parallel_size=2", "layers that attend over sequences"),
    ],
)
def test_layouts_that_cut_it_say_what_to_declare(key: str, words: str) -> None:
    with as_world(2), pytest.raises(ConfigError, match=rf"{key}: .* plain nn.Module.* has to declare {words}"):
        Engine.build(load_config(overrides=[*KEYS, key]), model=seeded(), loss=mean_loss)


def test_fsdp_names_the_scalars_that_it_cannot_shard() -> None:
    model = seeded()
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match=r"fsdp2=true shards .* and scale has shape \[\]; give it shape \[1\]"):
        Engine.build(load_config(overrides=[*KEYS, "parallel.use_torch_fsdp2=true"]), model=model, loss=mean_loss)


def test_losses_of_another_shape_than_the_weights_are_refused() -> None:
    engine = Engine.build(
        load_config(overrides=list(KEYS)), model=seeded(), loss=lambda output, batch: output["rating"]
    )
    with pytest.raises(ConfigError, match=r"the loss returned \[2, 11\] numbers for weights \[2\]"):
        next(engine.train_step(batch) for batch in engine.train_batches(Rows()))


def test_without_a_model_the_families_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"model.family is not set; choose a preset \(mt models lists them\) or one of"
    ):
        Engine.build(load_config(overrides=list(KEYS)))
