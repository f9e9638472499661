"""The value model of PPO (rl.advantage="gae"): a second model with a score at each token, an optimizer and checkpoints
of its own, in the layout of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mt_core.checkpoint_lookup import (
    CHECKPOINTS,
    MODEL,
    checkpoint_of_step,
    find_checkpoint,
    open_checkpoint,
    open_start,
)
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import LoadedConfig, config_from_dict
from mt_core.config.schema import Config
from mt_core.data.loader import RankBatch
from mt_core.errors import CheckpointError, ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.train.batch_source import TrainingRun
from mt_core.train.engine import Engine
from mt_tune.rl.config import DROPOUTS, VALUE, RLConfig
from mt_tune.rl.recorded import Recorded, Reduction, reduced
from mt_tune.rl.samples import OLD_VALUES, RETURNS
from mt_tune.rl.token_numbers import Scorer


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, bound: float | None) -> Tensor:
    """max((V - R)^2, (V' - R)^2) / 2 with V' = V within `bound` of the old value, elementwise; (V - R)^2 / 2 without a
    bound."""
    squares = (values - returns) ** 2
    if bound is None:
        return squares / 2
    near = torch.minimum(torch.maximum(values, old_values - bound), old_values + bound)
    return torch.maximum(squares, (near - returns) ** 2) / 2


class ValueLoss:
    """(scores [B, S, 1], batch) -> losses [B, S]; `loss_mask` has 1 at predicted positions of drawn tokens."""

    def __init__(self, bound: float | None) -> None:
        self.bound = bound
        self._recorded: list[Recorded] = []

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        values = output[..., 0].float()
        losses = clipped_value_loss(values, batch[OLD_VALUES], batch[RETURNS], self.bound)
        if torch.is_grad_enabled():
            self._collect(values.detach(), batch)
        return losses

    def _collect(self, values: Tensor, batch: Mapping[str, Tensor]) -> None:
        here = batch["loss_mask"] > 0
        recorded: Recorded = [("values/mean", values[here], "mean")]
        if self.bound is not None:
            far = (clipped_value_loss(values, batch[OLD_VALUES], batch[RETURNS], None)) < clipped_value_loss(
                values, batch[OLD_VALUES], batch[RETURNS], self.bound
            )
            recorded.append(("val/clipfrac_avg", far.float()[here], "mean"))
        self._recorded.append(recorded)

    def take_recorded(self) -> list[tuple[str, float, Reduction]]:
        """A value of each micro-batch, over its tokens."""
        taken, self._recorded = self._recorded, []
        return reduced(taken)


def build_value_loss(config: Config, parallel: ParallelContext) -> ValueLoss:
    return ValueLoss(config.section(RLConfig).value_clip)


FOLDER = "value_model"
"""Folder in the run directory; a run of its own with checkpoints of the same steps."""


class ValueModel:
    """Values of texts up to each token, which is trained on returns. All methods are collective."""

    def __init__(self, run: TrainingRun) -> None:
        """Raises ConfigError for a family without a score head, and for a model with another vocabulary."""
        self.run = run
        reader = value_start(run)
        config = value_config(run.config, reader, run)
        self.engine = Engine.build(LoadedConfig(config, {}, None), host=run.host, weights=reader)
        self.scorer = Scorer(self.engine, self.engine.model, values_of_scores)
        self.folder = None if run.directory is None else run.directory.path / FOLDER

    def values_of(self, batch: RankBatch) -> list[NDArray[np.float32]]:
        """[rows, width] of each micro-batch."""
        return self.scorer.of_tokens(batch)

    def step(self, batch: RankBatch) -> None:
        """One optimizer step on the rows of a step of the policy, with metrics."""
        self.engine.model.train()
        outcome = self.engine.train_step(batch)
        self.run.record("loss/value_avg", outcome.loss)
        if outcome.grad_norm is not None:
            self.run.record("values/grad_norm", outcome.grad_norm)
        loss = self.engine.loss
        assert isinstance(loss, ValueLoss)
        for name, value, reduction in loss.take_recorded():
            self.run.record(name, value, reduction)

    # -- checkpoints: before that of the policy, so that one of the policy always has one of its values ----

    def save(self) -> None:
        """Writes the checkpoint of this step; nothing for a run without a directory."""
        if self.folder is not None:
            self.engine.save_state(self.folder)

    def load(self) -> None:
        """Goes on from the checkpoint of the policy's step. Raises CheckpointError where there is none."""
        step = self.run.state.iteration
        path = None if self.folder is None else checkpoint_of_step(self.folder / CHECKPOINTS, step)
        if path is None:
            raise CheckpointError(
                f"{self.folder} has no checkpoint of step {step}: the value model of this run is not there"
            )
        self.engine.load_state(path)


def values_of_scores(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """[B, S, 1] -> [B, S]"""
    return output[..., 0].float()


def value_start(run: TrainingRun) -> CheckpointReader | None:
    """What rl.value_model names, else what the policy started from; None for initial weights."""
    keys, start = run.config.section(RLConfig), run.config.checkpoint.start
    if keys.value_model is not None:
        return open_checkpoint(find_checkpoint(Path(keys.value_model)), run.host)
    return None if start is None else open_start(start, run.host)


def value_config(config: Config, reader: CheckpointReader | None, run: TrainingRun) -> Config:
    """The policy's configuration with another model, loss and learning rate."""
    keys, tree = config.section(RLConfig), config.to_dict()
    if keys.value_model is not None and reader is not None:
        tree["model"] = _stored_model(reader, config, keys.value_model)
    tree["score_head"] = {"type": "sequence", "num_labels": 1}
    changed = {"loss": VALUE, "loss_normalization": "tokens", "loss_divisor": None}
    tree["train"] |= {**changed, "batch_source": "dataset", "cuda_graphs": "none"}
    if keys.value_lr is not None:
        tree["optimizer"] |= _scaled(tree["optimizer"], keys.value_lr / config.optimizer.lr)
    # Tensors of the LM head have no place in it.
    ignored = _tensors_of_lm_head(reader)
    tree["checkpoint"] |= {"save": None, "load": None, "load_parts": None, "best_metric": None, "save_frozen": True}
    tree["checkpoint"] |= {"load_missing": [], "load_ignored": ignored, "keep_last": _kept(config)}
    if tree.get("adapter", {}).get("load") is not None:
        tree["adapter"] = {**tree["adapter"], "load": None}
    return config_from_dict(tree, run.host)


def _stored_model(reader: CheckpointReader, config: Config, path: str) -> Mapping[str, Any]:
    """The section [model] of the checkpoint. Raises ConfigError for another family or vocabulary than the policy's."""
    stored: Mapping[str, Any] = reader.metadata["config"]["model"]
    for key in ("family", "vocab_size"):
        ours = getattr(config.model, key)
        if stored.get(key) != ours:
            raise ConfigError(
                f"rl.value_model={path} has model.{key}={stored.get(key)}, and the policy {ours}; take a model of the "
                "policy's family and tokenizer"
            )
    return {**stored, **{name: 0.0 for name in DROPOUTS if name in stored}}


def _scaled(optimizer: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """All learning rates that are set, by one factor."""
    names = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr")
    return {name: optimizer[name] * factor for name in names if optimizer.get(name) is not None}


def _tensors_of_lm_head(reader: CheckpointReader | None) -> Sequence[str]:
    head = "output_layer."
    names = () if reader is None else reader.shapes()
    return [f"{head}*"] if any(name.startswith(MODEL + head) for name in names) else []


def _kept(config: Config) -> int | None:
    """One more than of the policy: its oldest one stays until the policy's next is complete."""
    return None if config.checkpoint.keep_last is None else config.checkpoint.keep_last + 1
