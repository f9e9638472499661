"""A run that Megatron began goes on here with Megatron's losses, gradient norms and weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mt_ckpt.megatron_dist.reader import open_checkpoint
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import load_config
from mt_core.train import Callback, Trainer

pytestmark = pytest.mark.skipif(
    "MT_GOLDEN" not in os.environ, reason="MT_GOLDEN does not name the folder of golden files"
)
OVERRIDES = [
    "model.family=gpt",
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=64",
    "model.vocab_size=256",  # Megatron's loss is over the padded vocabulary
    "model.max_position_embeddings=32",
    "tokenizer.tokenizer_type=NullTokenizer",
    "tokenizer.vocab_size=250",
    "data.seq_length=32",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.eval_interval=null",
    "train.train_iters=6",
    "train.num_threads=1",
    "optimizer.min_lr=1e-4",
    "optimizer.lr=1e-3",
    "optimizer.weight_decay=0.1",
    "optimizer.adam_beta2=0.95",
    "checkpoint.save_interval=null",
    "logging.progress=none",
]
SCHEDULES = {
    "steps_3_to_5_resumed_with_optimizer": [
        "lr_schedule.lr_decay_style=cosine",
        "lr_schedule.lr_warmup_iters=2",
        "lr_schedule.lr_warmup_init=1e-4",
        "lr_schedule.lr_decay_iters=10",
    ],
    "steps_3_to_5_fresh_optimizer_constant_lr": ["lr_schedule.lr_decay_style=constant"],
}


class Rows:
    """Samples 12 to 23 of the run are the rows of the batches of steps 3 to 5: [3, 4, 33]."""

    def __init__(self, batches: np.ndarray) -> None:
        self.rows = batches.reshape(-1, 33).astype(np.int64)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self.rows[index - 12]
        mask = np.ones(32, np.float32)
        return {"tokens": row[:-1], "labels": row[1:], "loss_mask": mask, "position_ids": np.arange(32)}


@pytest.fixture(scope="module")
def golden() -> Path:
    return Path(os.environ["MT_GOLDEN"]) / "ckpt/gpt"


def take_up(trainer: Trainer, reader: CheckpointReader, with_optimizer: bool) -> None:
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(reader.read(f"model.{name}"))
            if with_optimizer:
                states = ("step", "exp_avg", "exp_avg_sq")
                trainer.engine.optimizer.state[parameter] = {s: reader.read(f"optimizer.{s}.{name}") for s in states}
    trainer.state.restore(reader.metadata)


@pytest.mark.slow
@pytest.mark.parametrize("continuation", SCHEDULES)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_the_next_three_steps_are_megatrons(golden, continuation, backend, host) -> None:
    expected = json.loads((golden / "expected.json").read_text())
    archive = np.load(golden / "logits.npz")
    steps = []

    class Steps(Callback):
        def on_step_end(self, run, metrics) -> None:
            steps.append(metrics)

    options = [*OVERRIDES, *SCHEDULES[continuation], f"model.attention_backend={backend}"]
    batches = archive["batches_3_to_5"]
    trainer = Trainer(
        load_config(overrides=options, host=host), train_data=Rows(batches), valid_data={}, callbacks=[Steps()]
    )
    reader = open_checkpoint(golden / "dist_tp1_pp1", host, vocab_size=256)
    take_up(trainer, reader, with_optimizer="resumed" in continuation)

    ids = torch.from_numpy(archive["tokens"].astype(np.int64))
    with torch.no_grad():
        logits = trainer.model.eval()(ids[:, :-1])[..., :250]
    assert np.abs(logits.numpy() - archive["logits"]).max() < 1e-4

    trainer.train()
    for mine, theirs in zip(steps, expected[continuation], strict=True):
        assert mine["learning_rate"] == pytest.approx(theirs["lr"], rel=1e-12)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    key = "param_sums_after_step_5_resumed" if "resumed" in continuation else "param_sums_after_step_5_fresh"
    for name, parameter in trainer.model.named_parameters():
        _, magnitude = expected[key][name]
        assert parameter.double().abs().sum().item() == pytest.approx(magnitude, rel=1e-4), name
