"""What a teacher in any layout says of samples, under the hashes of their tokens: nothing in it depends on a layout.

The samples of all ranks are shared out over the data-parallel ranks of the teacher, each once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mt_core.data.loader import Arrays, RankBatch
from mt_core.nn.context_parallel.zigzag import unshard_sequence
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.train.batch_source import TrainingRun
from mt_core.train.losses import logits_of, whole_vocabulary
from mt_core.train.step.batches import DeviceBatches
from mt_tune.distill.cache import KEYED_BY, row_keys
from mt_tune.distill.config import DistillationConfig
from mt_tune.distill.divergences import top_k_of
from mt_tune.distill.teacher import Teacher, build_teacher

Answer = tuple[np.ndarray, ...]
"""What a teacher answers for a sample: (ids, log_probs), [S, k] both, or (logits [S, vocabulary],)."""
Samples = dict[str, Arrays]
"""Hash -> tokens, positions and segments of a sample, [S] each."""


@dataclass(frozen=True)
class RowTeacher:
    """top_k: None gives whole logits. vocab_size: of the student, to which the teacher's is cut."""

    teacher: Teacher
    micro_batch_size: int
    top_k: int | None
    temperature: float
    vocab_size: int

    def answers(self, local_samples: Samples, world: ParallelContext) -> dict[str, Answer]:
        """local_samples: of this rank. What this rank computes of the samples of all ranks: of each a rank has the
        answer, and some ranks have none. Collective over the world, also for a rank without samples."""
        samples = {
            key: arrays for of_rank in all_gather_objects(local_samples, world.world) for key, arrays in of_rank.items()
        }
        if not samples:
            return {}
        shared = self._share(sorted(samples))
        batches = [
            _collated([samples[key] for key in shared[start : start + self.micro_batch_size]])
            for start in range(0, len(shared), self.micro_batch_size)
        ]
        ctx = self.teacher.ctx
        spans = [range(number, number + 1) for number in range(len(batches))]
        taken = DeviceBatches(ctx.device, ctx.cp).take(RankBatch(batches, spans))
        outputs = self.teacher.outputs(taken)
        rows = [row for output in outputs for row in self._rows(logits_of(output))]
        # Tensor- and context-parallel ranks have the same answers.
        return dict(zip(shared, rows, strict=True)) if rows and ctx.tp.rank == ctx.cp.rank == 0 else {}

    def _share(self, keys: Sequence[str]) -> list[str]:
        """The samples of this data-parallel rank: as many on each, in full micro-batches, some of them twice."""
        dp, size = self.teacher.ctx.dp, self.micro_batch_size
        unit = dp.size * size
        count = -(-len(keys) // unit) * unit
        filled = [keys[number % len(keys)] for number in range(count)]
        return filled[dp.rank * (count // dp.size) : (dp.rank + 1) * (count // dp.size)]

    @torch.no_grad()
    def _rows(self, logits: Tensor) -> Iterator[Answer]:
        """logits [B, S of this rank, ids of this rank] -> the answer of each sample. Collective over tp and cp."""
        ctx, first = self.teacher.ctx, self.teacher.first_id
        if self.top_k is None:
            whole = whole_vocabulary(logits.float(), self.teacher.config, ctx)[..., : self.vocab_size]
            tensors = [whole]
        else:
            known = logits[..., : max(0, self.vocab_size - first)]
            top = top_k_of(known, self.top_k, self.temperature, first, ctx.tp)
            tensors = [top.ids, top.log_probs]
        arrays = [unshard_sequence(tensor, 1, ctx.cp).cpu().numpy() for tensor in tensors]
        return zip(*arrays, strict=True)


def build_row_teacher(run: TrainingRun, keys: DistillationConfig) -> RowTeacher:
    """Collective; raises as `build_teacher` does."""
    config = run.config
    assert config.model.vocab_size is not None
    teacher = build_teacher(run, keys, project=True)
    return RowTeacher(teacher, config.train.micro_batch_size, keys.top_k, keys.temperature, config.model.vocab_size)


def samples_of(batch: RankBatch) -> Samples:
    """The samples of a batch by their hashes."""
    samples: Samples = {}
    for arrays in batch.micro_batches:
        for row, key in enumerate(row_keys(arrays)):
            samples[key] = {name: arrays[name][row] for name in KEYED_BY if name in arrays}
    return samples


def _collated(samples: Sequence[Arrays]) -> Arrays:
    arrays = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    return {**arrays, "loss_mask": np.ones(arrays["tokens"].shape, np.float32)}
