"""Which differences between two runs can explain what parts first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_ops.compare.quantities import Quantity, first_parting
from mt_ops.reading.data_contents import OtherContent
from mt_ops.reading.run import Run
from mt_ops.report.sections.history import described

BATCH = ("train.global_batch_size", "train.micro_batch_size", "train.rampup_batch_size", "train.decrease_batch_size")
RATE = (
    "lr_schedule.",
    "optimizer.lr",
    "optimizer.min_lr",
    "train.train_iters",
    "train.train_samples",
    "train.train_epochs",
)
DATA = ("data.", "tokenizer.", "train.seed")
START = ("model.", "train.seed", "checkpoint.load", "checkpoint.start", "checkpoint.finetune")
STEP = ("optimizer.", "train.", "precision.", "lr_schedule.", "model.")
ROUNDING = (
    "parallel.",
    "precision.",
    "kernels.",
    "recompute.",
    "numerics.",
    "train.compile",
    "train.device",
    "train.cuda_graphs",
)
WITHOUT_EFFECT = ("logging.", "checkpoint.save", "checkpoint.keep", "inference.", "eval.")
SMALL = 1e-3
"""Relative differences below this at the first common step are those of rounding."""
TELLING = ("warning", "control", "changed", "skipped", "start")
"""Kinds of events that can change what follows."""

KEYS_OF: Mapping[str, tuple[str, ...]] = {
    "samples": BATCH,
    "global_batch_size": BATCH,
    "learning_rate": RATE,
    "loss_scale": ("precision.",),
    "skipped_iterations": ("precision.", "train."),
}


@dataclass(frozen=True)
class Cause:
    """key: of the configuration, or kind of the event. text: for a reader. Ordered from likely to possible."""

    key: str
    text: str


def causes(
    a: Run,
    b: Run,
    compared: Sequence[Quantity],
    differing: Sequence[Sequence[Any]],
    contents: Sequence[OtherContent],
    samples: str | None,
) -> list[Cause]:
    """differing: rows [key, value of a, value of b]. contents: files of the data that held something else. samples: how
    the drawn samples differ, None where they do not or are not known."""
    parted = first_parting(compared)
    if parted is None or parted.parts is None:
        return []
    likely_causes = list(_events(a, parted.parts.step)) + list(_events(b, parted.parts.step))
    if not parted.is_counter:
        likely_causes += [Cause(content.key, content.text) for content in contents]
    if samples is not None and not parted.is_counter:
        likely_causes.append(Cause("samples", samples))
    prefixes = _prefixes(parted, at_start=_is_first_step(parted, a, b))
    likely_causes += [_of_key(row) for prefix in prefixes for row in differing if str(row[0]).startswith(prefix)]
    return list(dict.fromkeys(likely_causes))


def _prefixes(parted: Quantity, *, at_start: bool) -> tuple[str, ...]:
    """Keys that the quantity depends on, the most specific first."""
    if parted.name in KEYS_OF:
        return KEYS_OF[parted.name]
    assert parted.parts is not None
    if parted.parts.relative < SMALL:
        return (*ROUNDING, *DATA, *STEP)
    return (*START, *DATA, *ROUNDING) if at_start else (*STEP, *DATA, *ROUNDING)


def _is_first_step(parted: Quantity, a: Run, b: Run) -> bool:
    assert parted.parts is not None
    both = [run.series[parted.name].steps[0] for run in (a, b) if parted.name in run.series]
    return parted.parts.step <= max(both, default=1)


def _of_key(row: Sequence[Any]) -> Cause:
    key, mine, theirs = row
    return Cause(str(key), f"{key} is {mine} in A and {theirs} in B")


def _events(run: Run, step: int) -> Iterator[Cause]:
    """The last events of the run before the step that can have changed it."""
    telling = [entry for entry in run.events if entry["kind"] in TELLING and 0 < entry["iteration"] <= step]
    for entry in telling[-3:]:
        what = "resumed" if entry["kind"] == "start" else f"{entry['kind']}: {described(entry)}"
        yield Cause(f"event {entry['kind']}", f"{run.name}, step {entry['iteration']}: {what}")
