"""Tasks of an evaluation, each of samples with values, and the file that keeps the samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from mt_core.errors import ConfigError, DataError
from mt_infer.text import TextGenerator


@dataclass(frozen=True)
class Sample:
    """What was measured on one sample of a task.

    name: unique within the task. values: by metric; a mean over samples is weighted by `weight`. truncated: the model
    was given less text than the sample has. error: why the sample could not be scored; then it has no values. details:
    whatever else is worth keeping, such as the generated text; JSON values.
    """

    name: str
    values: Mapping[str, float] = field(default_factory=dict)
    weight: float = 1.0
    truncated: bool = False
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without what is as by default."""
        required: dict[str, Any] = {"name": self.name, "values": dict(self.values), "weight": self.weight}
        optional = {"truncated": self.truncated, "error": self.error, "details": dict(self.details)}
        return required | {key: value for key, value in optional.items() if value}


class Task(Protocol):
    """A measurement over a fixed sequence of samples."""

    @property
    def name(self) -> str:
        """By which results name it."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """JSON values that decide what is measured, the hash of the data among them."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def samples(self, generator: TextGenerator, skip: int) -> Iterator[Sample]:
        """Measures the samples in their order, without the first `skip` of them."""
        ...

    def metrics(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """Metrics over all samples of the task."""
        ...


def weighted_mean(samples: Iterable[Sample], metric: str) -> float:
    """Over samples that have the metric; nan if none has."""
    having = [sample for sample in samples if metric in sample.values]
    weight = sum(sample.weight for sample in having)
    return sum(sample.weight * sample.values[metric] for sample in having) / weight if weight else float("nan")


# -- samples in a file, from which a killed evaluation continues -------------------------------------

HEADER = "evaluation"


class Journal:
    """One line of JSON for each sample, behind a line that says what they are samples of.

    path: None keeps samples in memory. described: JSON values; a file with another description is refused.
    Raises DataError for a file that is no journal, or of another evaluation, and ConfigError for one that cannot be
    written.
    """

    def __init__(self, path: Path | None, described: Mapping[str, Any]) -> None:
        self._samples: dict[str, list[Sample]] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        # An empty file is that of a run which was killed before its header was written.
        end = self._read(path, described) if path.exists() and path.stat().st_size else 0
        self._file = _opened(path, "r+" if end else "w")
        # What was being written when the last run was killed.
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._write({HEADER: described})

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def samples(self, task: str) -> list[Sample]:
        """Those that were measured, in order."""
        return self._samples.get(task, [])

    def add(self, task: str, sample: Sample) -> None:
        self._samples.setdefault(task, []).append(sample)
        if self._file is not None:
            self._write({"task": task, **sample.to_dict()})

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        # To the operating system, not to the disk: a killed process loses nothing, a machine without power may.
        self._file.flush()

    def _read(self, path: Path, described: Mapping[str, Any]) -> int:
        """The number of bytes in whole lines."""
        recorded = read_journal(path)
        # Through JSON, so that tuples compare as the lists that the file holds.
        if recorded.end and recorded.described != json.loads(json.dumps(described)):
            raise DataError(
                f"{path} has samples of another evaluation (its first line says of which); give another --output, or "
                "remove it"
            )
        self._samples = recorded.samples
        return recorded.end


def _opened(path: Path, mode: str) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return cast(TextIO, path.open(mode, encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class Recorded:
    """What a journal holds. described: what the samples are of. samples: by task. end: bytes in whole lines."""

    described: Mapping[str, Any]
    samples: dict[str, list[Sample]]
    end: int


def read_journal(path: Path) -> Recorded:
    """Raises DataError for a file that cannot be read or is no journal."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; mt eval writes it with --output") from error
    # Bytes behind the last line break are of a line that was not finished.
    end = content.rfind(b"\n") + 1
    lines = content[:end].splitlines()
    if not lines:
        return Recorded({}, {}, 0)
    described = _header(path, lines[0])
    samples: dict[str, list[Sample]] = {}
    for number, line in enumerate(lines[1:], start=2):
        task, sample = parse_sample(path, number, line)
        samples.setdefault(task, []).append(sample)
    return Recorded(described, samples, end)


def parse_sample(path: Path, number: int, line: bytes) -> tuple[str, Sample]:
    """The task and sample of a line. Raises DataError with the line's number."""
    try:
        values = json.loads(line)
        return values.pop("task"), Sample(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}, line {number}: no sample of an evaluation; remove the file to start again") from error


def _header(path: Path, line: bytes) -> Any:
    try:
        return json.loads(line)[HEADER]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} holds something else than samples of mt eval; give another --output") from error
