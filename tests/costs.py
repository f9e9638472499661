"""What each test costs in CPU seconds (user and system), with the processes that it starts.

CPU time hardly depends on what else the machine does; wall time does. A run of many tests ends with the total and
the most expensive folders and tests; `-o costs=FILE` writes a line of JSON for each test.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUDGET_MINUTES = 12
"""For `uv run pytest` on two idle cores: CONTRIBUTING.md."""
MANY = 100
"""Tests from which on a run ends with a summary."""
SHOWN = 10
TICKS = os.sysconf("SC_CLK_TCK")
PROPERTY = "cpu_seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    # No option of its own: pytest would take the FILE behind it for a path of tests before it knows the option.
    parser.addini("costs", "file for the CPU seconds of each test, a line of JSON for each", type="string", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Meter())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(config.getini("costs")))


class Meter:
    """Measures each test, where it runs; the cost travels with the report of its teardown."""

    def __init__(self) -> None:
        self.before = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self.before = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            report.user_properties.append((PROPERTY, cpu_seconds() - self.before))
        return report


class Summary:
    """Adds up what the tests of all workers cost."""

    def __init__(self, file: str) -> None:
        self.file = Path(file) if file else None
        if self.file:
            self.file.write_text("")
        self.started = time.monotonic()
        self.of_test: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                self.add(report.nodeid, float(str(value)))

    def add(self, test: str, cost: float) -> None:
        self.of_test[test] = cost
        if self.file:
            with self.file.open("a") as file:
                file.write(json.dumps({"test": test, "cpu_seconds": round(cost, 3)}) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.of_test) >= MANY:
            terminalreporter.section("costs in CPU seconds")
            for line in self.lines():
                terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        folders: Counter[str] = Counter()
        for test, cost in self.of_test.items():
            folders["/".join(test.split("/")[:2])] += cost
        shown = [*folders.most_common(), *Counter(self.of_test).most_common(SHOWN)]
        minutes = (time.monotonic() - self.started) / 60
        took = f"{sum(folders.values()):.0f} CPU seconds and {minutes:.1f} minutes of wall time"
        total = f"{len(self.of_test)} tests took {took}"
        return [*(f"{cost:7.1f} {name}" for name, cost in shown), f"{total}; the whole suite may take {BUDGET_MINUTES}"]


def cpu_seconds() -> float:
    """Of this process, of its ended children, and of all descendants that live."""
    own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own + sum(_seconds_of(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _children(pid: int) -> list[int]:
    """Linux lists children with the thread that started them; a thread or process that ends meanwhile has none."""
    children: list[int] = []
    try:
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children += map(int, listed.read_text().split())
    except OSError:  # pathlib lists the folder of threads, which goes with the process
        pass
    return children


def _seconds_of(pid: int) -> float:
    """User and system time of a process and of the children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS
