"""Everything that is settled before a run writes anything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_core.interfaces import Tokenizer
from mt_core.paths import absolute
from mt_data.indexed.layout import dtype_for_vocab
from mt_data.preprocess.encoder import DocumentEncoder, TokenizerChoice
from mt_data.preprocess.executors import Executor, InlineExecutor, ProcessExecutor
from mt_data.preprocess.options import MachineShare, PreprocessOptions, machine_share
from mt_data.preprocess.parts import ReadOptions, Shard
from mt_data.preprocess.plan import (
    InputFile,
    Job,
    default_shard_bytes,
    examine,
    plan_jobs,
    report_empty,
    share_of_machine,
)
from mt_data.preprocess.readers import expand_globs
from mt_data.preprocess.sentences import splitter_identity
from mt_data.preprocess.shards import Task, build_encoder

IDENTITY_VERSION = 1
"""Grows when the same options would cut the input into other shards, or make other files of them."""

BYTES_WORTH_A_WORKER = 8 * 2**20
"""Input for which, by default, another process is started: what it takes to start, it could encode instead."""


@dataclass(frozen=True)
class RunPlan:
    """A run as it will be done."""

    options: PreprocessOptions
    share: MachineShare
    files: list[InputFile]
    """All inputs, also of other machines' shares."""
    jobs: list[Job]
    """Those of this machine's share."""
    shard_bytes: int
    executor: Executor
    task: Task
    outputs: dict[str, Path]
    """Prefix of the indexed dataset by JSON key."""
    tokenizer_record: dict[str, Any]
    """What manifests say of the tokenizer."""
    eod: int | None

    @property
    def partial_folder(self) -> Path:
        return Path(self.task.folder)

    @property
    def skipped_report(self) -> Path:
        return Path(f"{self.options.output_prefix}{self.share.suffix}.skipped.jsonl")

    @property
    def input_bytes(self) -> int:
        return sum(job.input_bytes for job in self.jobs)

    def identity(self) -> dict[str, Any]:
        """All that decides what the shards hold, as JSON values.

        Not `on_error`: a shard without a bad line is the same either way. Not the number of workers.
        """
        # Each entry either moves the cuts between shards or changes the bytes that a shard writes. An entry that is
        # missing here makes a continued run join shards of two kinds without an error.
        task, options = self.task, self.options
        return {
            "version": IDENTITY_VERSION,
            # All inputs and not this share's alone: where the shares begin depends on all of them.
            "inputs": [[str(absolute(file.path)), file.size, file.changed] for file in self.files],
            "input_format": options.input_format,
            "encodings": list(options.encodings),
            "share": [self.share.index, self.share.count],
            "shard_bytes": self.shard_bytes,
            # With Dask a compressed file is one shard; locally it is cut into chunks.
            "cut_streams": self.executor.feeds_streams,
            "max_line_bytes": options.max_line_bytes,
            "tokenizer": task.fingerprint,
            "json_keys": list(options.json_keys),
            "append_eod": options.append_eod,
            "dtype": task.dtype,
            "sentences": splitter_identity(*task.splitter) if task.splitter else None,
        }

    def check_inputs_unchanged(self) -> None:
        """DataError when an input is not as it was when the run was planned."""
        # Called between the last shard and the join: byte ranges were cut from the planned size, so lines that were
        # appended since would be missing without notice.
        for before, now in zip(self.files, examine(file.path for file in self.files), strict=True):
            if before != now:
                raise DataError(
                    f"{before.path} changed while it was read ({before.size} bytes then, {now.size} now); "
                    "run the same command again when it is complete"
                )


def plan_run(options: PreprocessOptions) -> RunPlan:
    """Settle a run. Raises ConfigError, PluginError or DataError for what cannot be done."""
    share = machine_share(options.shard, options.partitions)
    choice = TokenizerChoice.of(options.tokenizer_type, options.tokenizer)
    tokenizer = choice.build()
    paths = expand_globs(options.input, options.input_format)
    # Workers on other machines have another working folder; local messages keep the paths as the user wrote them.
    files = examine(map(absolute, paths)) if options.executor == "dask" else examine(paths)
    report_empty(files)
    shard_bytes = int(options.shard_mb * 2**20) if options.shard_mb else default_shard_bytes(files, share.count)
    feeds_streams = options.executor == "local"
    # All machines plan the whole corpus alike and then take their share, so they need not communicate.
    all_jobs = plan_jobs(files, max(shard_bytes, 1), options.input_format, feeds_streams, options.encodings)
    jobs = share_of_machine(all_jobs, share.index, share.count)
    prefix = f"{options.output_prefix}{share.suffix}"
    task = _task(options, f"{prefix}.partial", choice, tokenizer)
    encoder = build_encoder(task, tokenizer)  # raises now what every worker would raise
    return RunPlan(
        options=options,
        share=share,
        files=files,
        jobs=jobs,
        shard_bytes=max(shard_bytes, 1),
        executor=build_executor(options, encoder, jobs),
        task=task,
        outputs={key: Path(f"{prefix}_{key}_{options.level}") for key in options.json_keys},
        tokenizer_record={
            "tokenizer_type": options.tokenizer_type,
            "config": choice.config(),
            "fingerprint": task.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        },
        eod=tokenizer.special.eod,
    )


def _task(options: PreprocessOptions, folder: str, choice: TokenizerChoice, tokenizer: Tokenizer) -> Task:
    splitter = (options.sentence_splitter, options.lang, options.keep_newlines)
    return Task(
        # Absolute: the task is sent to other processes, on a cluster to other machines.
        folder=str(Path(folder).absolute()),
        tokenizer=choice,
        fingerprint=tokenizer.fingerprint(),
        json_keys=options.json_keys,
        level=options.level,
        dtype=dtype_for_vocab(tokenizer.vocab_size).name,
        append_eod=options.append_eod,
        splitter=splitter if options.split_sentences else None,
        on_error=options.on_error,
        read=ReadOptions(options.input_format, options.json_keys, options.max_line_bytes, options.encodings),
    )


def build_executor(options: PreprocessOptions, encoder: DocumentEncoder, jobs: list[Job]) -> Executor:
    if options.executor == "dask":
        from mt_data.preprocess.dask_executor import DaskExecutor

        return DaskExecutor(options.dask_scheduler or "")
    input_bytes = sum(job.input_bytes for job in jobs)
    # input_bytes are bytes on the disk; a compressed file counts less than the text that it holds.
    workers = options.workers or min(available_cores(), 1 + input_bytes // BYTES_WORTH_A_WORKER)
    if all(isinstance(job, Shard) for job in jobs):
        workers = min(workers, len(jobs))  # a file that is cut while it is read gives an unknown number of shards
    return InlineExecutor(encoder) if workers <= 1 else ProcessExecutor(workers, encoder)


def available_cores() -> int:
    """Cores that this process may use, divided among the processes that torchrun started on this machine."""
    # Set by torchrun, under which each rank of a machine does a share of its own (see machine_share) on the same cores.
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores() // int(local)) if local.isdecimal() and int(local) else cores()


def cores() -> int:
    """Cores that this process may use, whoever uses them too."""
    # The affinity mask respects taskset and cgroup cpusets, cpu_count does not; macOS has no such call.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
