"""Event files of TensorBoard, read without its package: scalars alone.

A file is a row of records: length (uint64), its checksum (4 bytes), a protocol buffer `Event`, its checksum. Checksums
are not compared. Fields: Event 1 wall_time, 2 step, 5 summary; Summary 1 value; Value 1 tag, 2 simple_value, 8 tensor;
TensorProto 1 dtype, 4 tensor_content, 5 float_val, 6 double_val.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mt_core.errors import DataError
from mt_ops.reading.columns import last_of_each_step
from mt_ops.reading.fields import mt_name
from mt_ops.reading.run import Run, Series

PATTERN = "events.out.tfevents.*"
OVER_SAMPLES = " vs samples"
VALIDATION = ("valid", "validation", "val", "eval", "test")
"""Groups of tags, and beginnings of such (`validation_metrics` of torchtitan), of what is evaluated beside training."""
KNOWN = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "tflops", "mfu(%)")
"""Names that need no group."""
MOST_FOLDERS = 8
TENSOR_FORMATS = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}
"""dtype of a TensorProto -> format of one value in tensor_content."""


class Scalar(NamedTuple):
    step: int
    wall_time: float
    tag: str
    value: float


def read_event_files(path: Path) -> Run:
    """path: a file, or a folder with them in it or in one folder below it. Tags that repeat another over samples are
    left out. Raises DataError for a folder with several runs."""
    by_tag = _scalars_by_tag(path)
    names = series_names(by_tag)
    series = {names[tag]: _series(values) for tag, values in by_tag.items()}
    axes = {"samples": series.pop("consumed_samples")} if "consumed_samples" in series else {}
    longest = max(by_tag.values(), key=len, default=[])
    if longest:
        times = last_of_each_step(*_arrays(longest, [scalar.wall_time for scalar in longest]))
        axes |= {"clock": times, "time": Series(times.steps, times.values - times.values[0])}
    return Run(
        name=path.name if path.is_dir() else path.parent.name,
        path=path,
        source="TensorBoard",
        series=series,
        axes=axes,
        missing=["configuration, events and status of ranks, which event files do not have"],
    )


def _scalars_by_tag(path: Path) -> dict[str, list[Scalar]]:
    files = [path] if path.is_file() else sorted(path.rglob(PATTERN), key=lambda file: file.name)
    by_tag: defaultdict[str, list[Scalar]] = defaultdict(list)
    folders: dict[Path, None] = {}
    for file in files:
        for scalar in scalars(file.read_bytes()):
            # A folder without scalars, such as one of hyperparameters, is no run.
            folders[file.parent] = None
            if not scalar.tag.endswith(OVER_SAMPLES):
                by_tag[scalar.tag].append(scalar)
    if len(folders) > 1:
        raise DataError(_several_runs(path, sorted(folders)))
    return by_tag


def _several_runs(path: Path, folders: Sequence[Path]) -> str:
    below = [str(folder.relative_to(path)) for folder in folders if folder != path]
    named = ", ".join(below[:MOST_FOLDERS]) + (f" and {len(below) - MOST_FOLDERS} more" if below[MOST_FOLDERS:] else "")
    own_files = " and event files of its own, which can be named one by one" if path in folders else ""
    return f"{path} has event files of several runs, {named}{own_files}; give the folder of one run"


def series_names(tags: Iterable[str]) -> dict[str, str]:
    """Tag -> its name; tags that would have one name keep their own."""
    names = {tag: _name(tag) for tag in tags}
    shared = Counter(names.values())
    return {tag: name if shared[name] == 1 else tag for tag, name in names.items()}


def _name(tag: str) -> str:
    """Name of a tag: `valid_` stands for a group of evaluations, such as `eval/loss` and `loss/val`. Another group
    before the last slash stays unless the name is known without it."""
    *groups, last = tag.split("/")
    if groups and last.lower() in (*VALIDATION, "train"):
        groups, last = [*groups[:-1], last], groups[-1]
    plain = "loss" if mt_name(last) == "global_avg_loss" else mt_name(last)
    prefix, _, rest = plain.partition("_")
    if prefix in VALIDATION and rest:
        return f"valid_{rest}"
    if any(group.lower().partition("_")[0] in VALIDATION for group in groups):
        return f"valid_{plain}"
    return plain if not groups or plain in KNOWN else tag


def _series(scalars_of_tag: list[Scalar]) -> Series:
    return last_of_each_step(*_arrays(scalars_of_tag, [scalar.value for scalar in scalars_of_tag]))


def _arrays(of_tag: list[Scalar], values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([scalar.step for scalar in of_tag], dtype=np.int64), np.array(values, dtype=np.float64)


# -- records and protocol buffers --------------------------------------------------------------------


def scalars(content: bytes) -> Iterator[Scalar]:
    """An incomplete last record, as a run that is going on leaves it, is left out."""
    for record in _records(content):
        wall_time, step, summaries = 0.0, 0, []
        for field, value in _fields(record):
            if field == 1:
                wall_time = struct.unpack("<d", value)[0]
            elif field == 2:
                step = int.from_bytes(value, "little")
            elif field == 5:
                summaries.append(value)
        for summary in summaries:
            for field, value in _fields(summary):
                if field == 1 and (scalar := _scalar(value)) is not None:
                    yield Scalar(step, wall_time, *scalar)


def _records(content: bytes) -> Iterator[bytes]:
    at = 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + 12 + length
        if end + 4 > len(content):
            return
        yield content[at + 12 : end]
        at = end + 4


def _scalar(value: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for field, content in _fields(value):
        if field == 1:
            tag = content.decode("utf-8", "replace")
        elif field == 2:
            number = struct.unpack("<f", content)[0]
        elif field == 8:
            number = _tensor(content)
    return None if number is None else (tag, float(number))


def _tensor(content: bytes) -> float | None:
    """Value of one number, None for another."""
    dtype, raw = 1, b""
    for field, value in _fields(content):
        if field == 1:
            dtype = int.from_bytes(value, "little")
        elif field in (4, 5, 6):
            raw = value
    code = TENSOR_FORMATS.get(dtype)
    return struct.unpack(code, raw)[0] if code is not None and len(raw) == struct.calcsize(code) else None


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number of the field, its bytes; of a varint 8 bytes in little endian)."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, (value & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            return
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, at
