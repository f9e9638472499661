"""Reward functions that misbehave on the sample whose completion names how."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

BEHAVIOURS = {
    "sleep": lambda: time.sleep(1000),
    "spin": lambda: any(iter(int, 1)),
    "exit": lambda: os._exit(3),
    "leave": lambda: sys.exit(4),
    "abort": lambda: os.abort(),
    "memory": lambda: bytearray(1 << 33),
    "raise": lambda: [][1],
}


def each(completions: list[str], **kwargs: Any) -> list[float]:
    """The length of each, once it has behaved as it says."""
    for completion in completions:
        BEHAVIOURS.get(completion, int)()
    return [float(len(completion)) for completion in completions]


def too_few(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0]


def process(completions: list[str], **kwargs: Any) -> list[float]:
    print("no part of the protocol")
    return [float(os.getpid())] * len(completions)


def has_torch(completions: list[str], **kwargs: Any) -> list[float]:
    return [float("torch" in sys.modules)] * len(completions)


def together(completions: list[str], **kwargs: Any) -> list[float]:
    """The share of the batch's characters; the batch must not hold a bad one."""
    assert "bad" not in completions
    total = sum(map(len, completions))
    return [len(completion) / total for completion in completions]


def times(factor: float) -> Any:
    def judge(completions: list[str], **kwargs: Any) -> list[float]:
        return [factor * len(completion) for completion in completions]

    return judge


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}


def starts_a_child(completions: list[str], **kwargs: Any) -> list[float]:
    """Leaves a process that sleeps, whose number is in a file, and never returns."""
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    with open(kwargs["file"][0], "w") as file:
        file.write(f"{os.getpid()} {child}")
    time.sleep(1000)
    return []
