"""Writes the answers of a teacher before the first step, and opens those that are there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mt_core.checkpoint_base import described
from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.data.loader import RankBatch
from mt_core.parallel.context import wait_for_all
from mt_core.parallel.first_rank import all_gather_objects, on_first_rank
from mt_core.train.batch_source import TrainingRun
from mt_core.train.checkpoint.state import MODEL
from mt_core.wording import counted
from mt_tune.distill.cache import (
    DESCRIPTION,
    CacheDescription,
    TeacherCache,
    require_cache_of,
)
from mt_tune.distill.config import RANDOM, DistillationConfig
from mt_tune.distill.rows import Answer, RowTeacher, Samples, build_row_teacher, samples_of

ROWS_OF_A_FILE = 256


def open_or_write(run: TrainingRun, keys: DistillationConfig) -> TeacherCache:
    """The cache of distillation.cache, with the samples of this run where distillation.teacher is given. Collective.

    Raises ConfigError for a cache of another teacher, and CheckpointError for a folder that is none.
    """
    assert keys.cache is not None
    assert keys.top_k is not None
    folder = Path(keys.cache)
    wanted = on_first_rank(lambda: _wanted(run, keys), run.ctx.world)
    if keys.teacher is not None:
        on_first_rank(lambda: _create(folder, wanted), run.ctx.world)
    cache = TeacherCache.open(folder)
    require_cache_of(cache.description, wanted, keys.cache)
    if keys.teacher is not None:
        _CacheWriter(run, keys, cache).write_missing()
    return cache


def _wanted(run: TrainingRun, keys: DistillationConfig) -> CacheDescription:
    assert keys.top_k is not None
    assert run.config.model.vocab_size is not None
    return CacheDescription(
        teacher="" if keys.teacher is None else teacher_hash(run, keys.teacher),
        path=keys.teacher or "",
        tokenizer=run.engine.tokenizer.fingerprint(),
        vocab_size=run.config.model.vocab_size,
        top_k=min(keys.top_k, run.config.model.vocab_size),
        temperature=keys.temperature,
    )


def _create(folder: Path, description: CacheDescription) -> None:
    if not (folder / DESCRIPTION).exists():
        TeacherCache.create(folder, description)


def teacher_hash(run: TrainingRun, teacher: str) -> str:
    """Hash of the names and values of its canonical tensors and of its configuration, whatever format holds them."""
    if teacher == RANDOM:
        return f"{RANDOM}-{run.config.train.seed + 1}"
    return hash_of_weights(open_checkpoint(find_checkpoint(teacher), run.host))


def hash_of_weights(reader: CheckpointReader) -> str:
    names = sorted(name for name in reader.shapes() if name.startswith(MODEL))
    content = {"tensors": described(reader, names), "model": reader.metadata["config"]["model"]}
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


class _CacheWriter:
    """Computes and writes the samples of a run that a cache lacks. Collective over the world."""

    def __init__(self, run: TrainingRun, keys: DistillationConfig, cache: TeacherCache) -> None:
        self.run, self.keys, self.cache = run, keys, cache
        self._teacher: RowTeacher | None = None
        self._rows: dict[str, Answer] = {}

    def write_missing(self) -> None:
        engine = self.run.engine
        size, count = engine.batch_size.full, min(engine.total_samples, len(self.run.train_data))
        sets = [(self.run.train_data, count)]
        sets += [(dataset, engine.evaluated_samples(dataset)) for dataset in self.run.valid_data.values()]
        for dataset, samples in sets:
            steps = [(first, min(size, samples - first)) for first in range(0, samples, size)]
            for batch in engine.read_batches(dataset, steps):
                self._add(batch)
        self._flush()
        # All files are complete before any rank looks for them.
        wait_for_all()
        self.cache.read_index()
        self.run.message(f"distributions of the teacher: {counted(len(self.cache), 'sample')} in {self.cache.folder}")

    def _add(self, batch: RankBatch) -> None:
        ctx = self.run.ctx
        missing: Samples = {}
        if ctx.tp.rank == ctx.cp.rank == ctx.pp.rank == 0:
            missing = {key: arrays for key, arrays in samples_of(batch).items() if key not in self.cache}
        # A teacher is built where a rank lacks a sample, and then by all of them.
        if not any(all_gather_objects(bool(missing), ctx.world)):
            return
        self._rows |= self._built_teacher().answers(missing, ctx)
        if len(self._rows) >= ROWS_OF_A_FILE:
            self._flush()

    def _built_teacher(self) -> RowTeacher:
        if self._teacher is None:
            self._teacher = build_row_teacher(self.run, self.keys)
        return self._teacher

    def _flush(self) -> None:
        rows, self._rows = self._rows, {}
        if rows:
            # Named by content, so that no two runs and ranks write the same file.
            name = hashlib.blake2b("".join(sorted(rows)).encode(), digest_size=8).hexdigest()
            self.cache.write(name, {key: (answer[0], answer[1]) for key, answer in rows.items()})
