"""[rl] for a small run that checks a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_tune.rl.config import POLICY


def shrink_rl(section: Mapping[str, Any], tree: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The section for a small run: few and short completions, no reference, as there is no checkpoint to start from."""
    if tree["train"]["loss"] != POLICY:
        return section
    smallest_batch = tree["train"]["rampup_batch_size"][0]
    alone = section["group_size"] == 1
    sizes = [1] if alone else [size for size in range(2, smallest_batch + 1) if smallest_batch % size == 0]
    longest = min(section["max_completion_length"], 6)
    return {
        **section,
        "group_size": max((size for size in sizes if size <= section["group_size"]), default=sizes[0]),
        "max_completion_length": longest,
        "overlong_buffer": min(section["overlong_buffer"], longest // 2),
        "beta": 0.0,
        # A resumed run has no evaluation at its start to compare.
        "eval_on_start": False,
        "value_model": None,
        "steps_per_generation": min(section["steps_per_generation"], 2),
        "num_iterations": min(section["num_iterations"], 2),
        "max_generations": min(section["max_generations"], 2),
        # A random model may draw what nothing is learned from.
        "patience": 0,
        # Its sizes belong to the large number of processes.
        "generator_processes": 0,
        "generation_parallel": None if section.get("generation_parallel") is None else {},
        # No code of the user's is executed.
        "environments": [],
        "tools": [],
        "environment_options": {},
        "write_rollouts": False,
        # Of one process; and bounds of a larger generation.
        "asynchronous": False,
        "extra_groups": 0,
        "max_staleness": 0,
    }
