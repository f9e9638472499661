"""Two runs compared: configuration, environment, samples, counters, losses; as values and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mt_ops.compare.explanation import WITHOUT_EFFECT, Cause, causes
from mt_ops.compare.quantities import Parting, Quantity, first_parting, quantities
from mt_ops.reading.data_contents import OtherContent, changed_since, other_contents
from mt_ops.reading.run import Run
from mt_ops.report.html import shown
from mt_ops.report.sections.configuration import (
    absent_sections,
    differing,
    flat_environment,
    section_of,
    sections_as_a_whole,
)

if TYPE_CHECKING:
    from mt_ops.compare.drawn_samples import DrawnSamples

TOLERANCE = 1e-3
MOST_ROWS = 40


@dataclass(frozen=True)
class Comparison:
    """configuration, environment: rows [key, value of A, value of B]. contents: files of the data that held something
    else. changed: files that are no longer what a run was trained on. samples: of both data sets, None where
    they were not compared."""

    a: Run
    b: Run
    configuration: Sequence[Sequence[Any]]
    environment: Sequence[Sequence[Any]]
    contents: Sequence[OtherContent]
    changed: Sequence[str]
    samples: DrawnSamples | None
    quantities: Sequence[Quantity]
    causes: Sequence[Cause]

    @property
    def first(self) -> Quantity | None:
        """What parts first."""
        return first_parting(self.quantities)


def compare(a: Run, b: Run, tolerance: float = TOLERANCE, samples: DrawnSamples | None = None) -> Comparison:
    """tolerance: relative, of losses, norms and other computed values."""
    configs = [a.config, b.config]
    configuration = list(differing(configs, configs)) if not without_configuration(a, b) else []
    absent = absent_sections(configuration, configs)
    known = [row for row in configuration if section_of(row[0]) not in absent]
    places = [dict(flat_environment(run)) for run in (a, b)]
    environment = list(differing(places, places)) if all(places) else []
    compared = quantities(a, b, tolerance)
    contents = other_contents(a, b)
    changed = [line for run in (a, b) for line in changed_since(run)]
    changed += samples.warnings if samples is not None else ()
    likely_causes = causes(a, b, compared, known, contents, None if samples is None else samples.other)
    return Comparison(a, b, configuration, environment, contents, changed, samples, compared, likely_causes)


def without_configuration(a: Run, b: Run) -> list[str]:
    """ "A" and "B", where a run has no configuration whose keys the other one could have."""
    sections = [set(map(section_of, run.config)) for run in (a, b)]
    if sections[0] & sections[1]:
        return []
    names = {"A": a, "B": b}
    return [name for name, run in names.items() if run.source != "mt" or not run.config] or list(names)


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """JSON values."""
    first = comparison.first
    return {
        "same": first is None,
        "first": None if first is None else {"quantity": first.name, **asdict(first.parts)},  # type: ignore[arg-type]
        "causes": [asdict(cause) for cause in comparison.causes],
        "quantities": [asdict(quantity) for quantity in comparison.quantities],
        "without_configuration": without_configuration(comparison.a, comparison.b),
        "configuration": [list(row) for row in comparison.configuration],
        "environment": [list(row) for row in comparison.environment],
        "contents": [asdict(content) for content in comparison.contents],
        "changed_files": list(comparison.changed),
        "samples": None if comparison.samples is None else comparison.samples.text,
    }


def lines(comparison: Comparison) -> Iterator[str]:
    """For a reader."""
    yield f"A {comparison.a.path} ({comparison.a.source}), {comparison.a.last_step:,} steps"
    yield f"B {comparison.b.path} ({comparison.b.source}), {comparison.b.last_step:,} steps"
    configs = [comparison.a.config, comparison.b.config]
    if absent := without_configuration(comparison.a, comparison.b):
        names = " and ".join(absent) + (" have" if len(absent) > 1 else " has")
        yield f"configuration: {names} none that can be compared; whether keys differ is not known"
    yield from _rows("configuration", sections_as_a_whole(comparison.configuration, configs))
    yield from _rows("environment", comparison.environment)
    yield from (f"data: {content.text}" for content in comparison.contents)
    yield from (f"warning: {line}" for line in comparison.changed)
    if comparison.samples is not None:
        yield f"samples: {comparison.samples.text}"
    yield ""
    yield f"{'quantity':24} {'steps':>7} {'first other':>12} {'parts at':>10} {'largest difference':>20}"
    for quantity in comparison.quantities:
        yield _line(quantity)
    yield from (f"{quantity.name}: {quantity.note}" for quantity in comparison.quantities if quantity.note)
    yield ""
    yield from _verdict(comparison)


def _rows(title: str, rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    if not rows:
        return
    yield f"{title}: {len(rows)} {'difference' if len(rows) == 1 else 'differences'}"
    # Last come keys that one version of mt alone has, and those that cannot change a number.
    order = sorted(rows, key=lambda row: (str(row[0]).startswith(WITHOUT_EFFECT), None in row))
    for key, mine, theirs in order[:MOST_ROWS]:
        yield f"  {key}: {shown(mine)} | {shown(theirs)}"
    if len(rows) > MOST_ROWS:
        yield f"  and {len(rows) - MOST_ROWS} more; --json has all"


def _line(quantity: Quantity) -> str:
    first, parts = _step(quantity.first), _step(quantity.parts)
    return f"{quantity.name:24} {quantity.steps:7,} {first:>12} {parts:>10} {quantity.largest:20.2e}"


def _step(parting: Parting | None) -> str:
    return "-" if parting is None else f"{parting.step:,}"


def _verdict(comparison: Comparison) -> Iterator[str]:
    first = comparison.first
    if not any(quantity.steps for quantity in comparison.quantities):
        yield "nothing to compare: no quantity that both have at the same step"
        return
    if first is None or first.parts is None:
        yield "the same within tolerance"
        return
    at = first.parts
    yield f"they part at step {at.step:,} in {first.name}: {at.a:.9g} | {at.b:.9g} (relative {at.relative:.1e})"
    if comparison.causes:
        yield "which can come from"
        yield from (f"  {cause.text}" for cause in comparison.causes[:10])
    else:
        yield "nothing before it that differs explains this; mt compare --deep names the first tensor"
