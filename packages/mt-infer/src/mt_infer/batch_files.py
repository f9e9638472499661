"""From a file of prompts to a file of completions. After a kill the same command resumes.

A line of the input (or row of a parquet file) is {"prompt": text} or {"tokens": [ids]}; keys that are sampling
parameters (max_tokens, seed, ...) are those of this line, and others are copied to its line of the output; for a RETRO
`neighbors` or `passages` are texts that it reads (mt_infer.neighbors). A line of
the output has `completions`, each with text, number of tokens, finish_reason, and the log-probabilities and scores that
were requested; or `error`, for a line that cannot be served. Lines are in the order of the input, so that the number of
whole lines in the output says what is left to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from mt_core.errors import ConfigError, MtError
from mt_core.json_objects import DuplicateKeyError, parse_json
from mt_core.paths import writing
from mt_infer.completions import Completion
from mt_infer.in_order import answered_in_order
from mt_infer.job_record import job_of, require_same_job
from mt_infer.neighbors import with_neighbors
from mt_infer.parquet_output import write_parquet
from mt_infer.prompts import Prompt
from mt_infer.sampling.noise import request_seed
from mt_infer.sampling.parameters import SamplingParameters, is_integer
from mt_infer.text import TextGenerator

PARQUET = ".parquet"
PROMPT, TOKENS = "prompt", "tokens"
SAMPLING_KEYS = frozenset(entry.name for entry in fields(SamplingParameters))
ANSWERED = ("completions", "error")
"""Keys of the output alone; an input that has them was the output of another job."""
ROWS = 1024
"""Rows of a parquet file that are read at a time."""


@dataclass
class Line:
    """A line of the input. number: from 0."""

    number: int
    values: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def as_record(self, completions: Sequence[Completion]) -> dict[str, Any]:
        kept = {key: value for key, value in self.values.items() if key not in (*SAMPLING_KEYS, *ANSWERED)}
        if self.error is not None:
            return {**kept, "error": f"line {self.number + 1}: {self.error}"}
        return {**kept, "completions": [_completion(completion) for completion in completions]}


@dataclass(frozen=True)
class Progress:
    """lines: done, those of earlier runs included. failed: of this run. tokens: generated in this run."""

    lines: int
    failed: int
    tokens: int


def generate_file(
    generator: TextGenerator,
    source: Path,
    target: Path,
    sampling: SamplingParameters,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Writes a line to `target` for each of `source`. Lines that `target` has already are left as they are.

    sampling: for lines that do not say otherwise; with a seed, each line has one of its own that follows from it.
    `target`.job.json records the job (mt_infer.job_record). Raises ConfigError for files that cannot be read or
    written, and for a target that another job has begun, or that is the source or has something else in it.
    """
    # Parquet cannot be appended to line by line: lines go to FILE.partial, which resumes as a file of lines does, and
    # become a parquet file at the end.
    is_parquet = target.suffix == PARQUET
    if is_parquet:
        _parquet()  # before anything is generated
    lines = target.with_name(target.name + ".partial") if is_parquet else target
    # Also the check that the source can be read, before anything is written.
    total = count_lines(source)
    with writing(target, "--output"):
        _require_other_files(source, target, lines)
        # Killed, or called again, after the last step: nothing is left to do.
        is_written = is_parquet and target.exists() and not lines.exists()
        # `size` cuts off the last line if a kill left it incomplete; it is generated again. With a seed, each line's
        # own follows from its number, so that the file is what one run would have written.
        done, size = whole_lines(lines)
        has_lines = is_written or (lines.exists() and lines.stat().st_size > 0)
        job = job_of(source, sampling, generator.fingerprint, generator.config)
        # Before the output is opened: a file of another job stays as it is.
        require_same_job(job, target, has_lines=has_lines)
        if is_written:
            return Progress(total, 0, 0)
        # A lone surrogate is written as JSON's escape of it, which pyarrow does not read.
        errors = "replace" if is_parquet else "backslashreplace"
        with lines.open("a", encoding="utf-8", errors=errors) as out:
            out.truncate(size)
            progress = _write(generator, islice(_lines(source), done, None), sampling, out, done, on_progress)
        if is_parquet:
            write_parquet(lines, target)
            lines.unlink()
    return progress


def _write(
    generator: TextGenerator,
    lines: Iterator[Line],
    sampling: SamplingParameters,
    out: IO[str],
    done: int,
    on_progress: Callable[[Progress], None],
) -> Progress:
    progress = Progress(done, 0, 0)
    # In the order of the input, although requests end in any order: the count of lines is the only record of progress.
    for answered in answered_in_order(generator, lines, partial(_submit, generator, sampling=sampling)):
        line = answered.item
        line.error = line.error or next(
            (completion.error for completion in answered.completions if completion.error), None
        )
        out.write(json.dumps(line.as_record(answered.completions), ensure_ascii=False) + "\n")
        # To the operating system: a killed process loses nothing that was answered.
        out.flush()
        tokens = sum(len(completion.tokens) for completion in answered.completions)
        failed = progress.failed + (line.error is not None)
        progress = Progress(progress.lines + 1, failed, progress.tokens + tokens)
        on_progress(progress)
    return progress


def count_lines(source: Path) -> int:
    if source.suffix == PARQUET:
        return int(_parquet().ParquetFile(source).metadata.num_rows)
    with _opened(source) as file:
        return sum(1 for _ in file)


def _submit(generator: TextGenerator, line: Line, sampling: SamplingParameters) -> tuple[int, int] | None:
    if line.error is not None:
        return None
    try:
        line_sampling = _sampling_of(line, sampling)
        prompt, inputs = with_neighbors(generator, _prompt_of(line), line.values, line_sampling.max_tokens)
        # n, not the number that best_of generates: completions are reported for n.
        return generator.submit(prompt, line_sampling, inputs), line_sampling.n
    # Whatever a line can cause (types of JSON, nesting, the tokenizer): an error in its own line of the output, not an
    # end of the file.
    except (MtError, TypeError, ValueError, RecursionError) as error:
        line.error = str(error)
        return None


def _prompt_of(line: Line) -> Prompt:
    """Raises ConfigError for a line without a prompt, or with two."""
    present = [key for key in (PROMPT, TOKENS) if key in line.values]
    if len(present) != 1:
        listed = ", ".join(line.values) or "nothing"
        raise ConfigError(f'a line has either "{PROMPT}" (a text) or "{TOKENS}" (ids); this one has {listed}')
    value = line.values[present[0]]
    if present[0] == PROMPT and not isinstance(value, str):
        raise ConfigError(f'"{PROMPT}" is {json.dumps(value)[:40]}; it must be a text')
    is_ids = isinstance(value, list) and all(is_integer(token) for token in value)
    if present[0] == TOKENS and not is_ids:
        raise ConfigError(f'"{TOKENS}" must be a list of ids')
    return value


def _sampling_of(line: Line, sampling: SamplingParameters) -> SamplingParameters:
    values = {key: value for key, value in line.values.items() if key in SAMPLING_KEYS}
    if "seed" not in values and sampling.seed is not None:
        # Equal prompts of one file get different texts, the same in every run.
        values["seed"] = request_seed(sampling.seed, line.number)
    return replace(sampling, **values)


def _completion(done: Completion) -> dict[str, Any]:
    record = {"text": done.text, "tokens": len(done.tokens), "finish_reason": done.finish and done.finish.value}
    if done.logprobs:
        record |= {"token_ids": done.tokens, "logprobs": [asdict(entry) for entry in done.logprobs]}
    if done.prompt_logprobs is not None:
        record["prompt_logprobs"] = [entry and asdict(entry) for entry in done.prompt_logprobs]
    return record if done.score is None else {**record, "score": done.score}


# -- files -----------------------------------------------------------------------------------------


def _lines(source: Path) -> Iterator[Line]:
    if source.suffix == PARQUET:
        rows = (row for batch in _parquet().ParquetFile(source).iter_batches(ROWS) for row in batch.to_pylist())
        yield from (Line(number, _present(row)) for number, row in enumerate(rows))
        return
    with _opened(source) as file:
        for number, text in enumerate(file):
            yield _parsed(number, text)


def _parsed(number: int, text: bytes) -> Line:
    try:
        values = parse_json(text)
    except DuplicateKeyError as error:
        return Line(number, error=str(error))
    except (ValueError, RecursionError) as error:
        return Line(number, error=f"no JSON: {error}")
    if not isinstance(values, dict):
        return Line(number, error=f"a line is an object with a prompt, not {type(values).__name__}")
    return Line(number, values)


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that the row has a value for."""
    return {key: value for key, value in row.items() if value is not None}


def _opened(source: Path) -> Any:
    try:
        return source.open("rb")
    except OSError as error:
        raise ConfigError(f"--input {source} cannot be read: {error.strerror}") from error


def _require_other_files(source: Path, *written: Path) -> None:
    """Raises ConfigError for an input that is one of the files that are written."""
    # samefile: also under another name, or by a link.
    if any(path.exists() and path.samefile(source) for path in written):
        raise ConfigError(f"--output would replace --input {source}; give another --output")


def whole_lines(path: Path) -> tuple[int, int]:
    """(count, size in bytes) of the lines that are complete; behind them is what a killed run has left."""
    count = size = 0
    if not path.exists():
        return count, size
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            count, size = count + 1, size + len(line)
    return count, size


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("parquet files need pyarrow, which is not installed (pip install pyarrow)") from error
    return pyarrow.parquet
