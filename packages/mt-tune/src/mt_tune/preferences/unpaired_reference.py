"""Batches of single answers with the reference's log-probabilities and with what rewards are compared with
(train.batch_source="unpaired_reference")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mt_core.data.loader import RankBatch
from mt_core.train.batch_source import TrainingRun
from mt_tune.preferences.lookahead import OfAnswers, flat, of_counted
from mt_tune.preferences.reference import ReferenceSource, rows_with_prefix, with_field
from mt_tune.preferences.samples import BASELINE, CLASS_SHARE, DESIRABLE, OTHER_PROMPT, REFERENCE_LOGPS


class UnpairedReferenceSource(ReferenceSource):
    """Baselines are those of the global batch, whatever its micro-batches and ranks: KTO's by answers to other prompts,
    BCO's the mean of the implicit rewards of all batches of training, this one included."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self.prefixes = ("", OTHER_PROMPT) if self.keys.unpaired_loss == "kto" else ("",)
        self.mean_reward, self.rewards_seen = 0.0, 0

    def complete(self, batch: RankBatch) -> RankBatch:
        of_answers = rows_with_prefix(batch, "")
        references = self.reference_sums(of_answers)
        completed = with_field(of_answers, REFERENCE_LOGPS, references)
        completed = with_field(completed, CLASS_SHARE, self._class_shares(completed))
        return with_baseline(completed, self._baseline(batch, of_answers, references))

    def _baseline(self, batch: RankBatch, of_answers: RankBatch, references: Any) -> float:
        """In units of rewards."""
        if self.keys.unpaired_loss == "kto":
            others = rows_with_prefix(batch, OTHER_PROMPT)
            return self.keys.beta * self._divergence(others)
        if self.keys.unpaired_loss == "bco":
            return self._mean_reward(self.ahead.ratios(of_answers, references))
        return 0.0

    def _divergence(self, others: RankBatch) -> float:
        """The estimate of the divergence from the reference: z, at least 0."""
        ratios, _ = self.ahead.gathered(flat(self.ahead.ratios(others, self.reference_sums(others))))
        return max(float(ratios.mean()), 0.0) if len(ratios) else 0.0

    def _mean_reward(self, ratios: OfAnswers) -> float:
        rewards = self.keys.beta * self.ahead.gathered(flat(ratios))[0]
        if self.run.model.training and len(rewards):
            self.rewards_seen += len(rewards)
            self.mean_reward += (float(rewards.mean()) - self.mean_reward) * len(rewards) / self.rewards_seen
        return self.mean_reward

    def _class_shares(self, batch: RankBatch) -> OfAnswers:
        """For each answer the value of CLASS_SHARE; 0 in a batch with answers of one label. Collective."""
        signs = of_counted(batch, [[_signs(a, row) for row in range(len(a["tokens"]))] for a in batch.micro_batches])
        everywhere, _ = self.ahead.gathered(flat(signs))
        desirable, undesirable = int((everywhere > 0).sum()), int((everywhere < 0).sum())
        if not desirable or not undesirable:
            return [[[0.0 for _ in row] for row in rows] for rows in signs]
        share = {1.0: len(everywhere) / desirable, -1.0: -len(everywhere) / undesirable}
        return [[[share[sign] for sign in row] for row in rows] for rows in signs]

    def state_dict(self) -> Mapping[str, Any]:
        running = {"mean_reward": self.mean_reward, "rewards_seen": self.rewards_seen}
        return {**super().state_dict(), **(running if self.keys.unpaired_loss == "bco" else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.mean_reward, self.rewards_seen = state.get("mean_reward", 0.0), state.get("rewards_seen", 0)


def _signs(arrays: Mapping[str, np.ndarray], row: int) -> list[float]:
    """Signs of the answers of a row, in their order."""
    values = arrays[DESIRABLE][row]
    return values[values != 0].tolist()


def with_baseline(batch: RankBatch, value: float) -> RankBatch:
    return replace(
        batch,
        micro_batches=[{**a, BASELINE: np.full(a["tokens"].shape, value, np.float32)} for a in batch.micro_batches],
    )
