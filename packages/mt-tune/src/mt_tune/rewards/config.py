"""The section [rewards]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section


class RewardsConfig(Section):
    """Reward functions of generated texts."""

    functions: list[str] = Field(default_factory=list)
    """Names of registered rewards (`mt plugins --kind rewards`), and functions of rewards.modules as `module:function`,
    with the signature of TRL's reward functions or of verl's compute_score. `LABEL=NAME` gives one another name in
    metrics and options, for instance to use it twice."""
    weights: list[float] = Field(default_factory=list)
    """Factors of the functions in the sum. Default: 1 each."""
    modules: list[str] = Field(default_factory=list)
    """Python modules and files (.py) whose code this run executes: those that rewards.functions takes
    functions from."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name of a function in rewards.functions -> its options. For one of rewards.modules: keyword arguments of a
    function that returns the reward function."""
    deadline_seconds: PositiveFloat = 60.0
    """Time of one call, after which its process is ended."""
    workers: NonNegativeInt = 4
    """Processes in which functions are called. 0: calls in the process of training, which nothing can end."""
    memory_mb: PositiveInt = 2048
    """Address space that a process may take beside what it has once its functions are imported."""
    samples_per_call: PositiveInt | None = None
    """Samples in one call of a function of rewards.modules, all if null, as in TRL. Registered functions that judge
    each sample by itself have them one at a time."""
    on_failure: Literal["raise", "skip"] = "raise"
    """A function that raises, ends its process or exceeds the deadline ends the run, or (skip) leaves the sample out,
    with a warning that names it and the metric rewards/FUNCTION/failed. Wrong results (their number, NaN) always end
    it."""


SMALL_PATTERNS = {"lower": "[a-z]", "upper": "[A-Z]", "other": "[^a-zA-Z]"}


def shrink_rewards(section: Mapping[str, Any], tree: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The section for a small run: patterns that some texts of a random model match and others do not, so that
    advantages are not all 0, as they are where it has to be right. No code of the user's is executed."""
    if not section.get("functions"):
        return section
    return {
        **section,
        "functions": [f"{label}=regex" for label in SMALL_PATTERNS],
        "weights": [1.0, 0.6, 0.3],
        "options": {label: {"pattern": pattern} for label, pattern in SMALL_PATTERNS.items()},
        "modules": [],
        "workers": 0,
    }
