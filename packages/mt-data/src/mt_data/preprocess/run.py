"""The whole of a run: plan, do the shards, join them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mt_core.errors import DataError
from mt_data.indexed import IndexedDatasetWriter
from mt_data.preprocess.options import Counts, PreprocessOptions, PreprocessReport
from mt_data.preprocess.partial import PartialFolder, lock_partial_folder
from mt_data.preprocess.parts import Shard, shard_name
from mt_data.preprocess.plan import CutStream, cut_stream, interleave
from mt_data.preprocess.run_plan import RunPlan, plan_run
from mt_data.preprocess.shards import ShardResult, output_files, skipped_path

# -- progress ----------------------------------------------------------------------------------------


class Progress(Protocol):
    """Called from the thread that runs `preprocess`. `rich_progress` draws it; `SilentProgress` does nothing."""

    def note(self, text: str) -> None:
        """A sentence for the user, such as which part of the corpus is done."""
        ...

    def begin(self, total_bytes: int) -> None:
        """The plan is made: this many bytes of input are to be worked through."""
        ...

    def advance(self, counts: Counts, reused: bool) -> None:
        """A shard is done, or (reused) was done by an earlier run."""
        ...

    def join(self, shards: int) -> None:
        """All shards are done and are now joined into the outputs."""
        ...


class SilentProgress:
    """Watches without a word."""

    def note(self, text: str) -> None: ...

    def begin(self, total_bytes: int) -> None: ...

    def advance(self, counts: Counts, reused: bool) -> None: ...

    def join(self, shards: int) -> None: ...


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
        results = [self._usable(shard_name((job.number, chunk))) for chunk in range(length)]
        # Nothing is kept unless all chunks are usable: otherwise _remaining meets each chunk again and keeps it then,
        # and a result that was kept here already would be joined twice.
        kept = [result for result in results if result is not None]
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


# -- joining shards, in the order of the input -------------------------------------------------------


def refuse_existing(prefixes: Iterable[Path]) -> None:
    """DataError when an output is there already."""
    for prefix in prefixes:
        for file in output_files(prefix):
            if file.exists():
                raise DataError(f"{file} exists; give another --output-prefix, or --overwrite to replace it")


def join_run(plan: RunPlan, folder: PartialFolder, results: list[ShardResult]) -> tuple[Counts, int]:
    """Write the outputs and the list of skipped lines; (sums over the shards, their number)."""
    zero = dict.fromkeys(plan.outputs, 0)
    counts = Counts(sequences=dict(zero), tokens=dict(zero))
    for result in results:
        counts.add(result.counts)
    if not counts.documents and plan.share.count == 1:
        raise DataError(
            f"the inputs hold no document that can be used ({counts.skipped} were skipped); give --input files with "
            "texts, and --json-keys the keys that hold them"
        )
    names = [result.name for result in results]
    # One output after the other; a kill in between leaves those before it finished, and all are written again by the
    # next run, since run.json does not say "joined" yet.
    for key, prefix in plan.outputs.items():
        with IndexedDatasetWriter(prefix, plan.task.dtype) as writer:
            for name in names:
                writer.append(folder.prefix(name, key, plan.task.level))
            writer.finish(tokenizer=plan.tokenizer_record, extra=_origin(plan, key, counts))
    _join_skipped(plan.skipped_report, [skipped_path(folder.path, r.name) for r in results if r.counts.skipped])
    folder.record_joined(counts, len(results))
    return counts, len(results)


def _origin(plan: RunPlan, key: str, counts: Counts) -> dict[str, Any]:
    """What the manifest says of how an output was made."""
    return {
        "made_by": "mt data preprocess",
        "json_key": key,
        "level": plan.task.level,
        "append_eod": plan.options.append_eod,
        "eod": plan.eod,
        "sentences": plan.identity()["sentences"],
        "inputs": [{"path": str(file.path), "size": file.size} for file in plan.files],
        "part": {"index": plan.share.index, "of": plan.share.count},
        "skipped": counts.skipped,
    }


def _join_skipped(path: Path, parts: list[Path]) -> None:
    """A JSON line for each skipped line of the input; no file when none was."""
    if not parts:
        # A report that an earlier run left would otherwise look like this run's.
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as joined:
        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, joined)
    os.replace(temporary, path)
