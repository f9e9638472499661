"""Words of the source: docstrings begin with a noun or a verb, and local names say what they hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
FRAGMENT = re.compile(r'"""(Of|As) ')
"""The beginning of a docstring that names nothing."""
VAGUE = re.compile(r"\b(?:for (?:\w+, )*)?(found|own|one|given|made)\b(?:, \w+)*(?: = | in | :?= )")
"""A binding to a word that could stand for anything: an assignment or the variable of a loop."""
PYTHON = sorted(PACKAGES.glob("*/src/**/*.py"))


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(PACKAGES)}:{number}: {line.strip()}"
        for path in PYTHON
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.match(line.strip())
    ]


@pytest.mark.parametrize("pattern", [FRAGMENT, VAGUE], ids=["docstrings", "names"])
def test_words(pattern: re.Pattern[str]) -> None:
    assert lines_with(pattern) == []
