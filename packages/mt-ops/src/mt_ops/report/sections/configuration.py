"""The configuration with the origin of each value, what differs between runs, and the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mt_ops.reading.run import Run
from mt_ops.report.html import Section, details, note, table

MOST_RUNS = 12
"""Runs beside one another in a table."""


def differences(runs: Sequence[Run]) -> Section | None:
    """Keys of the configuration and of the environment that are not the same in all runs."""
    if len(runs) < 2:
        return None
    shown = runs[:MOST_RUNS]
    headers = ["key", *(run.name for run in shown)]
    rows = list(differing([run.config for run in runs if run.config], [run.config for run in shown]))
    rows = sections_as_a_whole(rows, [run.config for run in shown])
    places = [dict(flat_environment(run)) for run in shown]
    rows += [[f"environment: {key}", *values] for key, *values in differing([p for p in places if p], places)]
    body = table(headers, rows) if rows else note("Configuration and environment are the same.")
    if len(runs) > MOST_RUNS:
        body += note(f"The first {MOST_RUNS} of {len(runs)} runs.")
    return Section("differences", "Differences of configuration", body)


def differing(all_values: Sequence[Mapping[str, Any]], shown: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Rows [key, value of each of `shown`] for each key that `all_values` do not agree on."""
    for key in dict.fromkeys(key for values in all_values for key in values):
        first = all_values[0].get(key)
        if any(values.get(key) != first for values in all_values):
            yield [key, *(values.get(key) for values in shown)]


def sections_as_a_whole(rows: Sequence[Sequence[Any]], configs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Rows [key, value of each of `configs`], with one row for a section that some of them do not have: that of a
    distribution which was not installed there. Others have its number of values; no configuration at all has no say."""
    absent = absent_sections(rows, configs)
    whole: dict[str, list[Any]] = {}
    for row in rows:
        section = section_of(row[0])
        if section not in absent:
            whole[str(row[0])] = list(row)
        elif f"[{section}]" not in whole:
            whole[f"[{section}]"] = [f"[{section}]", *(_extent(section, config) for config in configs)]
    return list(whole.values())


def absent_sections(rows: Sequence[Sequence[Any]], configs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Sections of the keys of `rows` that some of the configurations do not have, so that their values are unknown."""
    return {section for section in map(section_of, (row[0] for row in rows)) if _is_absent(section, configs)}


def section_of(key: Any) -> str:
    return str(key).partition(".")[0]


def _is_absent(section: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Keys without a section are those of other programs."""
    return any(config and _extent(section, config) is None for config in configs) and any(
        key.startswith(f"{section}.") for config in configs for key in config
    )


def _extent(section: str, config: Mapping[str, Any]) -> str | None:
    count = sum(key.startswith(f"{section}.") for key in config)
    return f"{count} values" if count else None


def configuration(runs: Sequence[Run]) -> Section | None:
    """Configuration of each run; values that were set before defaults."""
    parts = [
        details(f"{run.name}: {len(run.config)} values", _of_newest_process(run) + _table(run))
        for run in runs[:MOST_RUNS]
        if run.config
    ]
    return Section("configuration", "Configuration", "".join(parts)) if parts else None


def _of_newest_process(run: Run) -> str:
    """Note on a run that was resumed: its directory keeps one configuration."""
    if not run.resumes:
        return ""
    return note(
        f"As of the process that resumed at step {run.resumes[-1]:,}. Those before it may have had other values, which "
        "their checkpoints keep (mt ckpt inspect)."
    )


def _table(run: Run) -> str:
    rows = [[key, value, run.origins.get(key, "default" if run.origins else None)] for key, value in run.config.items()]
    chosen = [row for row in rows if row[2] != "default"]
    return table(["key", "value", "origin"], [*chosen, *(row for row in rows if row[2] == "default")])


def environment(runs: Sequence[Run]) -> Section | None:
    shown = [run for run in runs if run.environment][:MOST_RUNS]
    if not shown:
        return None
    flat = [dict(flat_environment(run)) for run in shown]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = [[key, *(values.get(key) for values in flat)] for key in keys]
    return Section("environment", "Environment", table(["", *(run.name for run in shown)], rows))


def flat_environment(run: Run) -> Iterator[tuple[str, Any]]:
    for key, value in run.environment.items():
        if isinstance(value, Mapping):
            yield from ((f"{key} {name}", content) for name, content in value.items())
        elif isinstance(value, list):
            yield key, " ".join(map(str, value))
        else:
            yield key, value
