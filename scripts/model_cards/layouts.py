"""Two training steps of a small model under layouts of two ranks, beside one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from scripts.model_cards.training import Training
from tests.dist import test_family_layouts
from tests.dist.in_turn import one_after_another
from tests.dist.test_layouts import TP2

from mt_core.errors import MtError
from mt_core.plugins import load_plugins
from mt_core.testing import RankFailureError, run_ranks
from mt_tools.verify.run_record import RunRecord, record_run

LAYOUTS = {"tp": (TP2,), **test_family_layouts.LAYOUTS}
STEPS = 2
WITHOUT_EFFECT = ("multichoice_head.bias",)
"""A shift of all scores changes no choice: gradients are rounding."""
SECONDS = 900.0
Case = tuple[Training, tuple[str, ...]]
Results = dict[str, dict[str, float | str]]
"""Training -> layout -> the largest relative difference of a gradient or a weight, or why the layout is refused."""


def proved(trainings: dict[str, Training], *, every: bool) -> Results:
    """every: all layouts, instead of the three that divide tensors, layers, and experts or sequences."""
    chosen = {name: labels_of(training, every=every) for name, training in trainings.items()}
    alone = records(1, [(training, ()) for training in trainings.values()])
    divided = records(2, [(trainings[name], LAYOUTS[label]) for name, labels in chosen.items() for label in labels])
    results: Results = {}
    for (name, labels), whole in zip(chosen.items(), alone, strict=True):
        found = [divided.pop(0) for _ in labels]
        results[name] = {
            label: one if isinstance(one, str) else whole if isinstance(whole, str) else difference(one, whole)
            for label, one in zip(labels, found, strict=True)
        }
    return results


def labels_of(training: Training, *, every: bool) -> list[str]:
    tensors = "tp" if training.example == "vision" else "tp-sp"
    if every:
        return [tensors, *(label for label in ("cp", "pp", "zero", "ep") if label != "ep" or training.experts)]
    return [tensors, "pp", "ep" if training.experts else "zero" if training.whole_sequences else "cp"]


def records(world: int, cases: Sequence[Case]) -> list[RunRecord | str]:
    """Of the first rank. In the same processes, or one by one where that fails."""
    try:
        of_ranks = run_ranks(world, one_after_another, run, cases, timeout=SECONDS)
        return list(of_ranks[0])
    except (RankFailureError, TimeoutError):
        return [record_of(world, case) for case in cases]


def record_of(world: int, case: Case) -> RunRecord | str:
    try:
        record: RunRecord | str = run_ranks(world, run, case, timeout=SECONDS)[0]
    except RankFailureError as error:
        return str(error).strip().splitlines()[-1]
    return record


def difference(found: RunRecord, alone: RunRecord) -> float:
    pairs = [(getattr(found, kind), getattr(alone, kind)) for kind in ("gradients", "weights")]
    return max(
        ((mine[name] - value).norm() / value.norm().clamp(min=1e-12)).item()
        for mine, theirs in pairs
        for name, value in theirs.items()
        if name not in WITHOUT_EFFECT
    )


def run(rank: int, world: int, case: Case) -> RunRecord | str | None:
    training, layout = case
    torch.set_num_threads(1)
    host = load_plugins()
    try:
        record: Any = record_run(training.config(layout, host), STEPS, host=host)
    except MtError as error:
        return str(error)
    return record if rank == 0 else None
