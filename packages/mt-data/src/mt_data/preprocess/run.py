"""The whole of a run: plan, do the shards, join them."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from mt_core.errors import DataError
from mt_data.preprocess.joining import join_run, refuse_existing
from mt_data.preprocess.options import Counts, PreprocessOptions, PreprocessReport
from mt_data.preprocess.partial import PartialFolder, lock_partial_folder
from mt_data.preprocess.parts import Shard, shard_name
from mt_data.preprocess.plan import CutStream
from mt_data.preprocess.progress import Progress, SilentProgress
from mt_data.preprocess.run_plan import RunPlan, plan_run
from mt_data.preprocess.shards import ShardResult
from mt_data.preprocess.streams import cut_stream, interleave

WORKERS_PER_STREAM = 16
"""Workers that one decompressing thread keeps busy, roughly."""


def preprocess(options: PreprocessOptions, progress: Progress | None = None) -> PreprocessReport:
    """Tokenize the inputs into an indexed dataset for each JSON key.

    The outputs appear when everything is done. What an earlier run with the same inputs, options and
    tokenizer had finished before it was interrupted is taken over. KeyboardInterrupt leaves the finished
    shards in `<output_prefix>.partial`, and no process.

    Raises ConfigError (options), PluginError (no such tokenizer), MalformedRecord (a line, with
    on_error="raise") and DataError (inputs, outputs, a worker that died).
    """
    started = time.monotonic()
    progress = progress or SilentProgress()
    plan = plan_run(options)
    if plan.share.count > 1:
        progress.note(f"part {plan.share.index} of {plan.share.count} ({plan.share.origin})")
    # The executor first: it forks its workers before this process opens lock files and starts threads. A worker that
    # inherited the descriptor of the lock would keep the folder locked after a kill of this process.
    with plan.executor.prepared(plan.task), lock_partial_folder(plan.partial_folder) as folder:
        finished = _take_up(plan, folder, progress)
        reused = 0
        # Not None: an earlier run was killed between the join and the removal of its folder; only the removal is left.
        if finished is None:
            work = _Work(plan, folder, progress)
            results = work.do()
            reused = work.reused
            plan.check_inputs_unchanged()
            progress.join(len(results))
            finished = join_run(plan, folder, results)
        # Only after join_run has recorded that it is done: until then the shards are the only copy of the work.
        folder.remove()
    counts, shards = finished
    return PreprocessReport(
        outputs=plan.outputs,
        share=plan.share,
        counts=counts,
        shards=shards,
        shards_reused=reused,
        skipped_report=plan.skipped_report if counts.skipped else None,
        seconds=time.monotonic() - started,
    )


def _take_up(plan: RunPlan, folder: PartialFolder, progress: Progress) -> tuple[Counts, int] | None:
    """Go on with the run in the folder, or begin one. What it joined, when all that is left is to clear up."""
    identity = plan.identity()
    different = folder.differences(identity) if folder.has_run else []
    if folder.has_run and not different:
        return folder.joined()
    # After the reuse above: a run that was killed between the outputs of two keys finds one of them under its final
    # name, and must be able to go on without --overwrite.
    if not plan.options.overwrite:
        _refuse_existing(plan, folder)
    if different:
        progress.note(
            f"{folder.path} holds shards of an earlier run with other {', '.join(different)}; they are thrown away"
        )
    folder.begin(identity)
    return None


def _refuse_existing(plan: RunPlan, folder: PartialFolder) -> None:
    try:
        refuse_existing(plan.outputs.values())
    except DataError:
        # The folder may be there for this run's lock alone.
        if not folder.has_run:
            folder.remove_locks()
        raise


@dataclass
class _Work:
    """Gets every shard of a run done, by an earlier run or by the executor."""

    plan: RunPlan
    folder: PartialFolder
    progress: Progress
    reused: int = 0

    def do(self) -> list[ShardResult]:
        """The results of all shards in the order of the input."""
        self._results: list[ShardResult] = []
        self.progress.begin(self.plan.input_bytes)
        # closing ends the read-ahead threads when the executor raises; the generator would else be finalized at any
        # time.
        with closing(self._remaining()) as shards:
            for result in self.plan.executor.run(self.plan.task, shards):
                self._keep(result, reused=False)
        # Shards finish in any order; the output has the order of the input.
        return sorted(self._results, key=lambda result: result.order)

    def _keep(self, result: ShardResult, reused: bool) -> None:
        self._results.append(result)
        self.reused += reused
        self.progress.advance(result.counts, reused)

    def _remaining(self) -> Generator[Shard]:
        """Shards that are still to be done; the others are kept on the way."""
        streams = [job for job in self.plan.jobs if isinstance(job, CutStream) and not self._reuse_stream(job)]
        for job in self.plan.jobs:
            if isinstance(job, Shard) and not self._reuse(job.name):
                yield job
        width = 1 + self.plan.executor.width // WORKERS_PER_STREAM
        with closing(interleave((self._chunks(job) for job in streams), width)) as chunks:
            for shard in chunks:
                # A stream that was not read to its end must be decompressed again from its start, but its finished
                # chunks are kept: the same options give the same chunks.
                if not self._reuse(shard.name):
                    yield shard

    def _chunks(self, job: CutStream) -> Generator[Shard]:
        chunks = 0
        for shard in cut_stream(job, self.plan.shard_bytes, self.plan.task.read):
            chunks += 1
            yield shard
        # Reached only at the end of the file. Without this record a later run cannot determine whether the last chunk
        # that it finds is the last of the file.
        self.folder.record_stream_length(job.number, chunks)

    def _reuse(self, name: str) -> bool:
        result = self._usable(name)
        if result is None:
            return False
        self._keep(result, reused=True)
        return True

    def _reuse_stream(self, job: CutStream) -> bool:
        """Whether all chunks of a compressed file are there, so that it need not be read again."""
        length = self.folder.stream_length(job.number)
        if length is None:
            return False
        found = [self._usable(shard_name((job.number, chunk))) for chunk in range(length)]
        # Nothing is kept unless all chunks are usable: otherwise _remaining meets each chunk again and keeps it then,
        # and a result that was kept here already would be joined twice.
        kept = [result for result in found if result is not None]
        if len(kept) < length:
            return False
        for result in kept:
            self._keep(result, reused=True)
        return True

    def _usable(self, name: str) -> ShardResult | None:
        """A finished shard; one that skipped lines does not do for a run that is to end at them."""
        result = self.folder.result(name)
        if result is not None and result.counts.skipped and self.plan.options.on_error == "raise":
            return None
        return result
