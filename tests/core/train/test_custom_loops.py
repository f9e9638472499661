"""The engine in loops of the caller: batches and weights from memory, passes apart, states, rates from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mt_core.config import load_config
from mt_core.errors import ConfigError, DataError, TrainingError
from mt_core.testing import run_ranks
from mt_core.train import Engine

SMALL = (
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.hidden_dropout=0"),
    *(
        "model.max_position_embeddings=16",
        "model.attention_dropout=0",
        "data.seq_length=16",
        "train.micro_batch_size=2",
    ),
    *("train.global_batch_size=8", "train.train_iters=10", "train.device=cpu"),
)


def build(*overrides: str) -> Engine:
    return Engine.build(load_config(preset="gpt-tiny", overrides=[*SMALL, *overrides]))


def rows(engine: Engine, step: int) -> dict[str, torch.Tensor]:
    """This rank's share of 8 samples, in Megatron's order."""
    tokens = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(step))
    dp = engine.ctx.dp
    own = [row for row in range(8) if row // 2 % dp.size == dp.rank]
    return {"tokens": tokens[own, :-1], "labels": tokens[own, 1:], "loss_mask": torch.ones(len(own), 16)}


def losses_apart(engine: Engine) -> list[float]:
    found = []
    for number in range(3):
        batch = rows(engine, number)
        count = len(batch["tokens"]) // 2
        step = engine.begin_step(micro_batches=count)
        for start in range(0, 2 * count, 2):
            part = {name: value[start : start + 2] for name, value in batch.items()}
            logits = step.forward(part)
            step.backward(mean_loss(engine, logits, part) / count)
        found.append(step.finish().loss)
    return found


def mean_loss(engine: Engine, logits: torch.Tensor, part: dict[str, torch.Tensor]) -> torch.Tensor:
    if engine.ctx.tp.size == 1:
        return F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten())
    from mt_core.nn.loss import build_cross_entropy

    return build_cross_entropy(engine.config, engine.ctx)(logits, part).mean()


def loop(rank: int, world: int, overrides: tuple[str, ...], folder: str) -> dict[str, Any]:
    engine = build(*overrides)
    found: dict[str, Any] = {"losses": [engine.train_step(engine.rank_batch(rows(engine, n))).loss for n in range(3)]}
    found["samples"] = engine.state.consumed_samples
    batch = engine.rank_batch(rows(engine, 0))
    engine.save_state(folder)
    found["evaluated"] = engine.eval_step(batch)
    engine.train_step(batch, learning_rate=1.0)
    found["moved"] = engine.eval_step(batch)
    engine.load_state(folder)
    found["restored"] = engine.eval_step(batch)
    found["iteration"] = engine.state.iteration
    found["gathered"] = engine.gather(torch.tensor([float(engine.ctx.dp.rank)])).tolist()
    found["apart"] = (
        losses_apart(build(*overrides)) if "parallel.pipeline_model_parallel_size=2" not in overrides else None
    )
    return found


LAYOUTS = {
    "TP 2": ("parallel.tensor_model_parallel_size=2",),
    "PP 2": ("parallel.pipeline_model_parallel_size=2",),
    "ZeRO-1": ("parallel.use_distributed_optimizer=true",),
    "FSDP2": ("parallel.use_torch_fsdp2=true",),
}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_of_the_caller_computes_the_same_under_every_layout(layout: str, tmp_path) -> None:
    alone = loop(0, 1, (), str(tmp_path / "alone"))
    assert alone["apart"] == pytest.approx(alone["losses"], rel=1e-6)
    for found in run_ranks(2, loop, LAYOUTS[layout], str(tmp_path / "ranks")):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["apart"] is None or found["apart"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["restored"] == found["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)
        assert abs(found["moved"] - found["evaluated"]) > 0.1
        assert (found["samples"], found["iteration"]) == (24, 3)
        assert found["gathered"] == ([0.0] if layout in ("TP 2", "PP 2") else [0.0, 1.0])


def test_what_a_loop_cannot_do_is_refused_by_name() -> None:
    engine = build()
    with pytest.raises(DataError, match="arrays of one length"):
        engine.rank_batch({"tokens": torch.zeros(2, 16), "labels": torch.zeros(3, 16)})
    with pytest.raises(TrainingError, match="begin_step"):
        engine.begin_step(2).finish()
    keys = {"pipeline_model_parallel_size": 2}
    engine.config = engine.config.model_copy(update={"parallel": engine.config.parallel.model_copy(update=keys)})
    with pytest.raises(ConfigError, match="parallel.pipeline_model_parallel_size=2: no process has all layers"):
        engine.begin_step()
