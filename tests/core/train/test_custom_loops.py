"""The engine in loops of the caller: batches and weights from memory, passes apart, states, rates from outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.dist.in_turn import one_after_another

from mt_core.config import load_config
from mt_core.errors import ConfigError, DataError, TrainingError
from mt_core.testing import run_ranks
from mt_core.train import Callback, Engine, Trainer

SMALL = (
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.hidden_dropout=0"),
    *(
        "model.max_position_embeddings=16",
        "model.attention_dropout=0",
        "data.seq_length=16",
        "data.corpus_bytes=200000",
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


class SameRows:
    """The batches of `rows`, as a data set."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        step, row = divmod(index, 8)
        tokens = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(step))[row].numpy()
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": np.ones(16, dtype=np.float32)}


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, run: Any, metrics: Any) -> None:
        self.found.append(metrics["loss"])


def losses_of_mt_train(overrides: tuple[str, ...]) -> list[float]:
    losses = Losses()
    config = load_config(preset="gpt-tiny", overrides=[*SMALL, *overrides, "train.exit_iteration=3"])
    Trainer(config, train_data=SameRows(), valid_data={}, callbacks=[losses]).train()
    return losses.found


def loop(rank: int, world: int, case: tuple[tuple[str, ...], str]) -> dict[str, Any]:
    """case: overrides, and the run directory for its checkpoints."""
    overrides, folder = case
    engine = build(*overrides)
    found: dict[str, Any] = {"losses": [engine.train_step(engine.rank_batch(rows(engine, n))).loss for n in range(3)]}
    found["mt train"] = losses_of_mt_train(overrides)
    found["samples"] = engine.state.consumed_samples
    batch = engine.rank_batch(rows(engine, 0))
    engine.save_state(folder)
    with pytest.raises(ConfigError, match="run directory /dev/null/run"):  # of the first rank, and raised on all
        engine.save_state("/dev/null/run")
    found["evaluated"] = engine.eval_step(batch)
    engine.train_step(batch, learning_rate=1.0)
    found["moved"] = engine.eval_step(batch)
    engine.load_state(folder)
    found["restored"] = engine.eval_step(batch)
    found["iteration"] = engine.state.iteration
    found["gathered"] = engine.gather(torch.tensor([float(engine.ctx.dp.rank)])).tolist()
    found["apart"] = losses_apart(build(*overrides)) if engine.ctx.pp.size == engine.ctx.cp.size == 1 else None
    return found


LAYOUTS = {
    "TP 2": ("parallel.tensor_model_parallel_size=2",),
    "PP 2": ("parallel.pipeline_model_parallel_size=2",),
    "CP 2": ("parallel.context_parallel_size=2",),
    "DP 2": (),
    "ZeRO-1": ("parallel.use_distributed_optimizer=true",),
    "FSDP2": ("parallel.use_torch_fsdp2=true",),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return loop(0, 1, ((), str(tmp_path_factory.mktemp("alone"))))


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Of each rank, by layout: in processes that import and build their first model once."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = [(overrides, str(folder / layout)) for layout, overrides in LAYOUTS.items()]
    return [dict(zip(LAYOUTS, found, strict=True)) for found in run_ranks(2, one_after_another, loop, cases)]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_of_the_caller_computes_the_same_under_every_layout(alone, on_two_ranks, layout: str) -> None:
    assert alone["apart"] == pytest.approx(alone["losses"], rel=1e-6)
    assert alone["losses"] == alone["mt train"]
    for found in (of_rank[layout] for of_rank in on_two_ranks):
        assert found["losses"] == found["mt train"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["apart"] is None or found["apart"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["restored"] == found["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)
        assert abs(found["moved"] - found["evaluated"]) > 0.1
        assert (found["samples"], found["iteration"]) == (24, 3)
        assert found["gathered"] == ([0.0] if layout in ("TP 2", "PP 2", "CP 2") else [0.0, 1.0])


HF_SECTIONS = {
    "train": {"train_iters": 10, "micro_batch_size": 2, "global_batch_size": 4, "device": "cpu"},
    "data": {"seq_length": 16},
}


@pytest.mark.slow
def test_a_model_and_a_configuration_of_transformers_become_an_engine() -> None:
    """Loss and logits are those of transformers; a step's outcome has them, and its other numbers by name."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 96}
    external = GPT2Config(**shape, bos_token_id=0, eos_token_id=95, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model = GPT2LMHeadModel(external).eval()
    tokens = torch.randint(0, 96, (4, 16))
    with torch.no_grad():
        expected = model(tokens, labels=tokens)
    labels = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
    mask = torch.ones(4, 16)
    mask[:, -1] = 0
    engine = Engine.from_hugging_face(model, HF_SECTIONS, return_logits=True)
    batch = engine.rank_batch({"tokens": tokens, "labels": labels, "loss_mask": mask})
    assert engine.eval_step(batch) == pytest.approx(expected.loss.item(), rel=1e-5)
    torch.testing.assert_close(engine.take_logits(), expected.logits, rtol=1e-4, atol=1e-5)
    assert engine.take_logits() is None
    outcome = engine.train_step(batch)
    assert outcome.loss == pytest.approx(expected.loss.item(), rel=1e-5)
    torch.testing.assert_close(outcome.logits, expected.logits, rtol=1e-4, atol=1e-5)
    expected = model(tokens, labels=tokens)
    expected.loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert outcome.metrics == {"grad_norm": pytest.approx(norm, rel=1e-4), "tokens": 60.0}

    fresh = Engine.from_hugging_face(external, {**HF_SECTIONS, "model": {"init_method_std": 0.5}})
    drawn = fresh.model.get_parameter("embedding.word_embeddings.weight")[:96]
    assert drawn.shape == (96, 32)
    assert drawn.std().item() == pytest.approx(0.5, rel=0.1)
    with pytest.raises(ConfigError, match="a Linear is no model and no configuration of transformers"):
        Engine.from_hugging_face(torch.nn.Linear(2, 2))


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


def test_a_process_of_torchrun_without_a_group_is_refused(monkeypatch) -> None:
    """Each process would train a model of its own on all data, with the losses that one process has."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"one of 2 processes .*rank_session"):
        Engine.build(load_config(preset="gpt-tiny", overrides=SMALL))
