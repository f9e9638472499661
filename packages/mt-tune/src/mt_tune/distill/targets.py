"""What a student's logits are compared with at each position of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mt_core.nn.context_parallel.zigzag import shard_sequence
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.loss import Unprojected
from mt_core.parallel.context import Axis
from mt_tune.distill.divergences import TopK

IDS, LOG_PROBS, LOGITS = "teacher_ids", "teacher_log_probs", "teacher_logits"
"""Fields of a micro-batch, over whole sequences: int32 and float32 [B, S, k], float32 [B, S, vocabulary]."""
ABSENT = -1e4
"""Logit of an id that the teacher does not have."""


class LogitRows(Protocol):
    """Logits of the positions of a micro-batch, one after another, of which a part is computed at a time."""

    width: int
    """Number of ids of this rank."""

    def __len__(self) -> int:
        """Number of positions."""
        ...

    def part(self, rows: slice) -> Tensor:
        """[positions, ids of this rank]"""
        ...


class StoredLogits:
    """logits [B, S, ids of this rank]"""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.flatten(0, -2)
        self.width = self.logits.shape[-1]

    def __len__(self) -> int:
        return len(self.logits)

    def part(self, rows: slice) -> Tensor:
        return self.logits[rows]


class ProjectedLogits:
    """Products of hidden states with the LM head, computed where they are needed."""

    def __init__(self, operands: Unprojected) -> None:
        self.rows, self.matrix, self.width = operands.rows(), operands.matrix(), len(operands.own)

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, rows: slice) -> Tensor:
        return (self.rows[rows] @ self.matrix.t())[..., : self.width]


def logit_rows(output: Any) -> LogitRows:
    """The rows of a model's output: logits, or the operands of them."""
    if isinstance(output, Unprojected):
        return ProjectedLogits(output)
    return StoredLogits(output.logits if hasattr(output, "logits") else output)


@dataclass(frozen=True)
class LogitTarget:
    """The teacher's logits of the ids that this rank has of the student's."""

    rows: LogitRows

    def part(self, rows: slice, width: int) -> Tensor:
        """width: columns of the student's logits. A teacher with other padding of its vocabulary is cut, or filled."""
        logits = self.rows.part(rows)
        missing = width - logits.shape[-1]
        return logits[..., :width] if missing <= 0 else torch.nn.functional.pad(logits, (0, missing), value=ABSENT)


@dataclass(frozen=True)
class TopKTarget:
    """[positions, k]"""

    top: TopK

    def part(self, rows: slice, width: int) -> TopK:
        return TopK(self.top.ids[rows], self.top.log_probs[rows])


Target = LogitTarget | TopKTarget


def target_in_batch(batch: Mapping[str, Tensor], columns: slice, cp: Axis) -> Target | None:
    """The target that the fields of a micro-batch are, if there are such. columns: the ids of this rank."""
    if IDS in batch:
        ids, log_probs = (shard_sequence(batch[name], SEQUENCE_DIM, cp).flatten(0, -2) for name in (IDS, LOG_PROBS))
        return TopKTarget(TopK(ids.long(), log_probs))
    if LOGITS in batch:
        return LogitTarget(StoredLogits(shard_sequence(batch[LOGITS][..., columns], SEQUENCE_DIM, cp)))
    return None
