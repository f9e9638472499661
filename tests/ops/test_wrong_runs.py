"""Runs made to go wrong: each has its picture and its command on the page, and one of them is found. 10 s."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.wrong_runs.__main__ import PICTURES, find
from scripts.wrong_runs.cases import CASES

PAGE = (PICTURES.parent / "wrong-run.md").read_text(encoding="utf-8")


def test_every_case_has_a_picture_and_its_command_on_the_page() -> None:
    assert sorted(CASES) == sorted(path.stem for path in PICTURES.glob("*.svg"))
    assert sorted(CASES) == sorted(re.findall(r"\]\(wrong-run/([\w-]+)\.svg\)", PAGE))
    assert len(CASES) == 10
    for case in CASES.values():
        assert f"$ mt {' '.join(case.command[:3])}" in PAGE


@pytest.mark.slow
def test_a_leak_of_memory_is_found(tmp_path: Path) -> None:
    """The cheapest case, as the script makes it."""
    _, answer = find(tmp_path, "memory-leak", tmp_path)
    assert "host memory grows by 4" in answer
    assert (tmp_path / "memory-leak.svg").read_text().startswith("<svg")
