"""A BERT that Megatron began to train goes on here with Megatron's logits, losses, gradient norms and weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from mt_ckpt.megatron_dist.reader import open_checkpoint
from mt_core.config.loading import load_config
from mt_core.nn.loss import cross_entropy
from mt_core.train import Callback, Trainer

pytestmark = pytest.mark.skipif(
    "MT_GOLDEN" not in os.environ, reason="MT_GOLDEN does not name the folder of golden files"
)
OVERRIDES = [
    "model.family=bert",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=128",
    "model.vocab_size=128",  # Megatron's loss is over the padded vocabulary
    "model.max_position_embeddings=32",
    "model.hidden_dropout=0.0",
    "model.attention_dropout=0.0",
    "tokenizer.tokenizer_type=NullTokenizer",
    "tokenizer.vocab_size=100",
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
    "lr_schedule.lr_decay_style=constant",
]


class Rows:
    """Samples 12 to 23 of the run are the rows of the batches of steps 3 to 5: [3, 4, 33].

    Every micro-batch of two rows has the same token types and padding, and every position counts in the loss.
    """

    def __init__(self, archive: Mapping[str, np.ndarray]) -> None:
        self.rows = archive["batches_3_to_5"].reshape(-1, 33).astype(np.int64)
        self.types, self.padding = archive["tokentype_ids"].astype(np.int64), archive["attention_mask"]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self.rows[index - 12]
        return {
            "tokens": row[:-1],
            "labels": row[1:],
            "tokentype_ids": self.types[index % 2],
            "padding_mask": self.padding[index % 2],
            "loss_mask": np.ones(32, np.float32),
        }


def attend_as_megatron(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern, dropout: float) -> torch.Tensor:
    """Megatron hides a key from a query by a score of -10000 when either is padding: queries at padding see all
    keys alike. It makes a difference only where padding counts in the loss, as in this run."""
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(q.shape[-1])
    both = pattern.key_padding[:, None, :, None] & pattern.key_padding[:, None, None, :]
    return torch.einsum("bnst,btnd->bsnd", scores.masked_fill(~both, -10000.0).softmax(-1), v)


def mean_over_words(output, batch) -> torch.Tensor:
    """Megatron's loss in this run; the binary head has a gradient of 0, so that its weights decay all the same."""
    return cross_entropy(output.logits, batch) + 0.0 * output.binary_logits.sum()


def test_the_next_three_steps_with_a_new_optimizer_are_megatrons(host) -> None:
    golden = Path(os.environ["MT_GOLDEN"]) / "ckpt/bert"
    expected, archive = json.loads((golden / "expected.json").read_text()), np.load(golden / "logits.npz")
    steps = []

    class Steps(Callback):
        def on_step_end(self, run, metrics) -> None:
            steps.append(metrics)

    trainer = Trainer(
        load_config(overrides=OVERRIDES, host=host),
        train_data=Rows(archive),
        valid_data={},
        callbacks=[Steps()],
        loss=mean_over_words,
    )
    reader = open_checkpoint(golden / "dist_tp1_pp1", host, vocab_size=128)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(reader.read(f"model.{name}"))
    trainer.state.restore({"iteration": 3, "consumed_samples": 12, "skipped_iterations": 0})

    ids = torch.from_numpy(archive["tokens"].astype(np.int64))
    types = torch.from_numpy(archive["tokentype_ids"].astype(np.int64))
    padding = torch.from_numpy(archive["attention_mask"])
    with torch.no_grad():
        output = trainer.model.eval()(ids[:, :-1], types, padding)
    losses = cross_entropy(output.logits, {"labels": ids[:, 1:]})
    seen = padding.bool().numpy()  # at padding Megatron's queries see every key, which nothing that counts reads
    assert np.abs(output.logits[..., :100].numpy() - archive["logits"])[seen].max() < 1e-4
    assert np.abs(output.binary_logits.numpy() - archive["binary_logits"]).max() < 1e-4
    assert np.abs(losses.numpy() - archive["token_losses"])[seen].max() < 1e-4

    for layer in trainer.model.encoder.layers:
        layer.self_attention.core = attend_as_megatron
    with torch.no_grad():
        output = trainer.model(ids[:, :-1], types, padding)
    assert np.abs(output.logits[..., :100].numpy() - archive["logits"]).max() < 1e-4
    trainer.train()
    for mine, theirs in zip(steps, expected["steps_3_to_5_fresh_optimizer_constant_lr"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    for name, parameter in trainer.model.named_parameters():
        _, magnitude = expected["param_sums_after_step_5_fresh"][name]
        assert parameter.double().abs().sum().item() == pytest.approx(magnitude, rel=1e-4), name
