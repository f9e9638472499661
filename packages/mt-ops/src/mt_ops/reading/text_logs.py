"""Logs of Megatron-LM and of torchtitan: lines with one step each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mt_ops.reading.columns import Columns
from mt_ops.reading.fields import COLOUR, mt_name, number, seconds_since_epoch
from mt_ops.reading.run import Run, Series

Row = dict[str, Any]

# -- Megatron-LM -------------------------------------------------------------------------------------

MEGATRON_STEP = re.compile(r"iteration\s+(\d+)/\s*\d+\s*\|")
MEGATRON_VALIDATION = re.compile(r"validation loss at iteration\s+(\d+)[^|]*\|(.*)")
MEGATRON_ARGUMENT = re.compile(r"^\s{2}(\w+)\s\.{2,}\s(.*)$")
MILLISECONDS = "elapsed time per iteration (ms)"


def megatron_rows(line: str) -> Iterator[Row]:
    """The row of a step or of an evaluation. Fields that are not known are kept under their own name."""
    if (step := MEGATRON_STEP.search(line)) is not None:
        row: Row = {"iteration": int(step.group(1)), "time": seconds_since_epoch(line)}
        for name, value in _fields(line[step.end() :]):
            if name.lower() == MILLISECONDS:
                row["iteration_time"] = value / 1000.0
            else:
                row[mt_name(name)] = value
        yield row
    elif (valid := MEGATRON_VALIDATION.search(line)) is not None:
        row = {"iteration": int(valid.group(1))}
        for name, value in _fields(valid.group(2)):
            if name.endswith(" value"):
                row[_validation_name(name.removesuffix(" value"))] = value
        yield row


def _fields(text: str) -> Iterator[tuple[str, float]]:
    for part in text.split("|"):
        name, separator, value = part.rpartition(":")
        if separator and (parsed := number(value)) is not None:
            yield name.strip(), parsed


def _validation_name(name: str) -> str:
    of_set = name.removeprefix("lm loss").strip()
    return "valid_loss" if not of_set else f"valid_{mt_name(of_set)}"


def megatron_arguments(lines: list[str]) -> dict[str, Any]:
    """Arguments that Megatron-LM prints when it starts."""
    matches = (MEGATRON_ARGUMENT.match(re.sub(r"^\[?\d+\]?:\s?", "", line)) for line in lines)
    return {f"arguments.{match.group(1)}": match.group(2).strip() for match in matches if match}


# -- torchtitan --------------------------------------------------------------------------------------

TITAN_STEP = re.compile(r"(validate\s+)?step:\s*(\d+)\s+loss:")
TITAN_FIELD = re.compile(r"([a-z_]+):\s*([-+]?[\d,.]+(?:[eE][-+]?\d+)?|nan|inf)", re.IGNORECASE)
TITAN_NAMES: Mapping[str, str] = {"tps": "tokens_per_second", "lr": "learning_rate", "memory": "memory_gib"}


def torchtitan_rows(line: str) -> Iterator[Row]:
    """The row of a step, or of a validation step. tokens_per_second is of one device, as torchtitan has it."""
    step = TITAN_STEP.search(line)
    if step is None:
        return
    valid = step.group(1) is not None
    row: Row = {"iteration": int(step.group(2)), "time": seconds_since_epoch(line)}
    for name, text in TITAN_FIELD.findall(line[step.start() :]):
        value = number(text)
        if value is None or name == "step":
            continue
        if name == "mfu":
            value /= 100.0  # a percentage
        if valid and name != "loss":
            continue
        row["valid_loss" if valid else TITAN_NAMES.get(name, name)] = value
    yield row


# -- both --------------------------------------------------------------------------------------------

READERS: Mapping[str, Callable[[str], Iterator[Row]]] = {"Megatron-LM": megatron_rows, "torchtitan": torchtitan_rows}
LONGEST_BEGINNING = 5000
"""Lines in which the first step has to stand."""


def source_of(lines: list[str]) -> str | None:
    """Whose log it is, None for another."""
    for line in lines[:LONGEST_BEGINNING]:
        for source, rows in READERS.items():
            if next(rows(line), None) is not None:
                return source
    return None


def read_text_log(path: Path, lines: list[str], source: str) -> Run:
    """lines: without colours."""
    columns = Columns()
    for line in lines:
        for row in READERS[source](line):
            columns.add(row)
    series = columns.series()
    axes = {}
    if "consumed_samples" in series:
        axes["samples"] = series.pop("consumed_samples")
    if (clock := series.pop("time", None)) is not None and np.isfinite(clock.values).all():
        axes["clock"] = clock
        axes["time"] = Series(clock.steps, clock.values - clock.values[0])
    return Run(
        name=path.name,
        path=path,
        source=source,
        series=series,
        axes=axes,
        config=megatron_arguments(lines) if source == "Megatron-LM" else {},
        missing=["events, environment and status of ranks, which a log does not have"],
    )


def plain_lines(path: Path) -> list[str]:
    return COLOUR.sub("", path.read_text(encoding="utf-8", errors="replace")).splitlines()
