"""Failures are printed at once: a command that runs out of time is killed before pytest reports them."""

from __future__ import annotations

import pytest


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.longreprtext}", flush=True)
