"""Raw text named in data_path: tokenized once, into the cache folder, and read as a token file from then on.

The parts of `mt data preprocess` do the work, so that the tokens are those of its output. For corpora that take
long that command is the better way: it goes on after a kill, and shares the work among machines.
"""

from __future__ import annotations

import glob
import hashlib
import multiprocessing
import pickle
import shutil
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_core.paths import as_path
from mt_data.datasets.cache import ContentCache, index_progress
from mt_data.indexed.dataset import IndexedDataset
from mt_data.indexed.layout import dtype_for_vocab
from mt_data.indexed.writer import IndexedDatasetWriter
from mt_data.preprocess.encoder import GivenTokenizer
from mt_data.preprocess.encodings import UTF8
from mt_data.preprocess.executors import Executor, InlineExecutor, ProcessExecutor
from mt_data.preprocess.formats import detect_format
from mt_data.preprocess.parts import ReadOptions, Shard
from mt_data.preprocess.plan import InputFile, Job, cut_stream, default_shard_bytes, examine, plan_jobs, report_empty
from mt_data.preprocess.readers import MAX_LINE_BYTES, expand_globs
from mt_data.preprocess.run_plan import BYTES_WORTH_A_WORKER, cores
from mt_data.preprocess.shards import Task, build_encoder, shard_prefix

STEM = "text_document"
LEVEL = "document"
VERSION = 3
"""Grows when the same text would give other tokens."""
_CHUNK = 1 << 24


@dataclass(frozen=True)
class RawTextOptions:
    """json_key: where the text is. workers: processes that tokenize it, which change no byte; None for as many as
    this process has cores, fewer for a small text. encodings: tried in turn on each file, or line. input_format: as of
    `detect_format`.
    """

    json_key: str = "text"
    workers: int | None = None
    encodings: tuple[str, ...] = UTF8
    input_format: str = "auto"


def is_raw_text(name: str, input_format: str = "auto") -> bool:
    """Whether a name in data_path is a file of text by its ending, a folder, or a pattern that matches something; a
    prefix that is called like one has an `.idx`. With a named format every file is text."""
    if as_path(f"{name}.idx").exists():
        return False
    path = as_path(name)
    if path.is_dir() or (input_format != "auto" and path.is_file()):
        return True
    if glob.has_magic(name) and "://" not in name and glob.glob(name, recursive=True):
        return True
    try:
        detect_format(Path(name))
    except DataError:
        return False
    return True


def tokenized(name: str, options: RawTextOptions, tokenizer: Tokenizer, cache: Path) -> Path:
    """Prefix of the token file made from the text that `name` stands for, each document followed by the eod id.

    name: a file, a folder or a pattern. The token file is found again by the text's content, the tokenizer's
    fingerprint and the options. Raises DataError,
    with file and line, for text that cannot be read, and when the cache cannot be written.
    """
    if "/" in options.json_key:
        raise ConfigError(f'data.json_key="{options.json_key}" cannot be part of a file name; rename the field')
    paths = expand_globs([name], options.input_format)
    files = examine(paths)
    key = {
        "kind": "tokens",
        "text": [_content_hash(path) for path in paths],
        "formats": [format_name(path, options.input_format) for path in paths],
        "json_key": options.json_key,
        "encodings": list(options.encodings),
        "tokenizer": tokenizer.fingerprint(),
        "version": VERSION,
    }

    def write(folder: Path) -> None:
        report_empty(files)
        _write_tokens(name, files, options, tokenizer, folder / STEM)

    try:
        return ContentCache(cache).get(key, write, _checked_prefix)
    except OSError as error:
        raise DataError(
            f"the tokens of {name} cannot be written into {cache}: {error.strerror or error}; "
            "set data.data_cache_path to a folder that can be written"
        ) from error


def _checked_prefix(folder: Path) -> Path:
    reader = IndexedDataset(folder / STEM)  # checks header and sizes
    if reader.manifest() is None:
        raise DataError(f"{reader.prefix} has no manifest")
    return folder / STEM


def _content_hash(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; check data.data_path") from error
    return digest.hexdigest()


def format_name(path: Path, input_format: str) -> str:
    """What decides, beside a file's content, the documents that are read from it."""
    detected = detect_format(path, input_format)
    return f"{detected.kind} {detected.compression}"


def _write_tokens(
    name: str, files: Sequence[InputFile], options: RawTextOptions, tokenizer: Tokenizer, prefix: Path
) -> None:
    size = sum(file.size for file in files)
    # As `mt data preprocess` cuts, so that large files are tokenized in parallel; the tokens do not depend on the cuts.
    jobs = plan_jobs(files, default_shard_bytes(files), options.input_format, encodings=options.encodings)
    # Inside of the cache entry under construction: a kill leaves nothing that would be taken for an entry.
    folder = prefix.with_name("shards")
    folder.mkdir()
    task = _task(folder, options, tokenizer)
    executor = _executor(task, tokenizer, options.workers, size)
    with index_progress(f"tokenizing {name}", size) as progress, closing(_shards(jobs, task)) as shards:
        results, done = [], 0
        for result in executor.run(task, shards):
            results.append(result)
            done += result.counts.input_bytes
            progress(done, size)
    with IndexedDatasetWriter(prefix, task.dtype) as writer:
        for result in sorted(results, key=lambda result: result.order):
            writer.append(shard_prefix(folder, result.name, options.json_key, LEVEL))
        writer.finish(
            tokenizer=_description(tokenizer), extra={"json_key": options.json_key, "append_eod": task.append_eod}
        )
    shutil.rmtree(folder)


def _task(folder: Path, options: RawTextOptions, tokenizer: Tokenizer) -> Task:
    return Task(
        folder=str(folder),
        # The run's own tokenizer is pickled: its name and options are not known here.
        tokenizer=GivenTokenizer(tokenizer),
        fingerprint=tokenizer.fingerprint(),
        json_keys=(options.json_key,),
        level=LEVEL,
        dtype=dtype_for_vocab(tokenizer.vocab_size).name,
        append_eod=tokenizer.special.eod is not None,
        splitter=None,
        on_error="raise",
        read=ReadOptions(options.input_format, (options.json_key,), MAX_LINE_BYTES, options.encodings),
    )


def _shards(jobs: list[Job], task: Task) -> Generator[Shard]:
    """The pieces of the text; a big compressed file is cut while it is read."""
    for job in jobs:
        if isinstance(job, Shard):
            yield job
        else:
            # The smallest size of a shard, since a compressed file's text is not known in advance.
            yield from cut_stream(job, default_shard_bytes([]), task.read)


def _executor(task: Task, tokenizer: Tokenizer, workers: int | None, size: int) -> Executor:
    """Processes beside this one where there is work for them, and where this one may start any."""
    if workers is None:
        workers = min(cores(), 1 + size // BYTES_WORTH_A_WORKER) if _can_be_sent(tokenizer) else 1
    elif workers > 1 and not _can_be_sent(tokenizer):
        raise ConfigError(
            f"data.tokenize_workers={workers}: {type(tokenizer).__name__} cannot be sent to other processes (or this "
            "one may not start any); set it to 1, or make token files with mt data preprocess"
        )
    # Without an encoder the processes are spawned, not forked: a training process has threads and perhaps a CUDA
    # context.
    return InlineExecutor(build_encoder(task, tokenizer)) if workers == 1 else ProcessExecutor(workers)


def _can_be_sent(tokenizer: Tokenizer) -> bool:
    # Daemonic processes, such as loader workers, may not start children.
    if multiprocessing.current_process().daemon:
        return False
    try:
        pickle.dumps(tokenizer)
    except Exception:  # whatever another's class raises
        return False
    return True


def _description(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer_type": type(tokenizer).__name__,
        "fingerprint": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
    }
