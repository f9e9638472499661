"""mt's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases import Case
from torch import Tensor

from mt_core.config.loading import load_config
from mt_core.data.loader import RankBatch
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.trainer import Trainer


class LastLoss(Callback):
    loss = float("nan")

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        self.loss = float(metrics["loss"])


def settings(case: Case) -> list[str]:
    keys: dict[str, Any] = {
        "model.family": case.family,
        "model.num_layers": case.layers,
        "model.hidden_size": case.hidden,
        "model.num_attention_heads": case.heads,
        "model.ffn_hidden_size": case.ffn,
        "model.vocab_size": case.vocab,
        "model.max_position_embeddings": case.sequence,
        "model.untie_embeddings_and_output_weights": "false",
        "data.seq_length": case.sequence,
        "train.micro_batch_size": case.batch,
        "train.train_iters": 100000,
        "train.eval_interval": "null",
        "checkpoint.save_interval": "null",
        "logging.progress": "none",
        "optimizer.lr": 1e-4,
    }
    if case.experts:
        keys["model.moe.num_experts"], keys["model.moe.moe_router_topk"] = case.experts, case.topk
        keys["model.moe.moe_router_load_balancing_type"] = '["none"]'
    return [f"{key}={value}" for key, value in keys.items()]


class NoData:
    """Batches are given to the steps."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def describe(self, index: int) -> str:
        return "random ids"


def build(case: Case) -> tuple[Callable[[Tensor], float], int]:
    seen = LastLoss()
    trainer = Trainer(load_config(overrides=settings(case)), train_data=NoData(), valid_data={}, callbacks=[seen])
    trainer.model.train()
    mask, positions = np.ones((case.batch, case.sequence), np.float32), np.arange(case.sequence)
    fixed: dict[str, np.ndarray] = {"loss_mask": mask, "position_ids": np.tile(positions, (case.batch, 1))}

    def step(ids: Tensor) -> float:
        arrays = ids.numpy()
        batch: dict[str, np.ndarray] = {"tokens": arrays[:, :-1], "labels": arrays[:, 1:], **fixed}
        trainer.take_step(RankBatch([batch], [range(case.batch)]))
        return seen.loss

    return step, sum(p.numel() for p in trainer.model.parameters())
