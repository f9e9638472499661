"""The longest sequence whose plan fits into a rank's memory."""

from __future__ import annotations

from collections.abc import Callable

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_tools.plan.layouts import LayoutPlan, Planner
from mt_tools.plan.machines import Machine

LoadAt = Callable[[int], Config]
"""Sequence length -> the validated configuration. Raises ConfigError for lengths that it cannot have."""


def longest_sequence(
    load: LoadAt, world: int, host: PluginHost, machine: Machine, memory_gib: float, unit: int
) -> tuple[int, LayoutPlan] | None:
    """(length, plan) of the longest sequence, a multiple of `unit` tokens, that fits into memory_gib; None if one unit
    does not. Memory grows with the length. Raises ConfigError if not even one unit is valid."""

    def fitting(units: int) -> LayoutPlan | None:
        try:
            config = load(units * unit)
        except ConfigError:
            if units == 1:
                raise
            return None
        planner = Planner(config, host, machine)
        planner.require_suitable_data()
        found = planner.plan(config, world)
        return found if found.memory_gib <= memory_gib else None

    best, units = fitting(1), 1
    if best is None:
        return None
    # Doubling: `units` fits and 2 * units does not.
    while (longer := fitting(2 * units)) is not None:
        best, units = longer, 2 * units
    # Then a binary search in between: steps of units / 2, units / 4, ..., 1.
    step = units // 2
    while step:
        if (longer := fitting(units + step)) is not None:
            best, units = longer, units + step
        step //= 2
    return units * unit, best
